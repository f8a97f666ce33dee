"""`samestep status`: what each rank of a run does, read from files alone."""

import json
import time
from typing import Any

import click

from samestep.errors import UsageError
from samestep.measure.runs import Run, find_run, read_run

_LOOK_S = 1.0


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("run", required=False)
@click.option("--json", "as_json", is_flag=True, help="One JSON object, with a schema_version.")
def command(run: str | None, as_json: bool) -> None:
    """Say what each rank of RUN (a directory, or a name that `samestep runs` lists) does; the newest by default."""
    try:
        found = find_run(run)
    except UsageError as error:
        click.echo(f"samestep status: {error}", err=True)
        raise SystemExit(2) from None
    speed, found = _look_twice(found)
    now = time.time()
    ranks = [
        {
            "rank": rank,
            "device": pulse.device,
            "step": pulse.step,
            "epoch": pulse.epoch,
            "age_s": now - pulse.unix,
        }
        for rank, pulse in found.pulses.items()
    ]
    facts = found.facts() | ({} if speed is None else {"steps_per_second": round(speed, 3)})
    if as_json:
        click.echo(json.dumps({"schema_version": 1, **facts, "by_rank": ranks}))
        return
    _print(found, facts, ranks)


def _look_twice(run: Run) -> tuple[float | None, Run]:
    """Steps a second just now, where it is running and takes one in a second."""
    if run.is_over or not run.pulses:
        return None, run
    time.sleep(_LOOK_S)
    later = read_run(run.path) or run
    rank = min(run.pulses)
    before, after = run.pulses[rank], later.pulses.get(rank, run.pulses[rank])
    steps, seconds = after.step - before.step, after.monotonic - before.monotonic
    return (steps / seconds if steps > 0 and seconds > 0 else None), later


def _print(run: Run, facts: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    speed = f", {facts['steps_per_second']:.3g} steps/s" if facts["steps_per_second"] else ""
    click.echo(f"{run.path}: {run.state}, {run.command} on {run.size} ranks{speed}")
    for row in ranks:
        step = "no step yet" if row["step"] < 0 else f"epoch {row['epoch']}, step {row['step']}"
        age = "" if run.is_over else f", {row['age_s']:.0f} s ago"
        click.echo(f"  rank {row['rank']:<4} {row['device']:<8} {step}{age}")
    if facts["failure"]:
        click.echo(f"\n{facts['failure']}")
