"""`samestep runs`: lists what was run, the newest first, from files alone."""

import time
from typing import Any

import click

from samestep.cli.output import print_json, verb
from samestep.measure.runs import list_runs, root_of
from samestep.text import printable


@verb("samestep runs")
@click.argument("directory", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(directory: str | None, as_json: bool) -> None:
    """List the runs in DIRECTORY  [$SAMESTEP_RUN_DIR, ./runs], the newest first.

    \b
    samestep runs
    samestep runs /scratch/runs --json
    """
    root = root_of(directory)
    rows = [run.facts() for run in list_runs(root)]
    if as_json:
        print_json({"runs": rows})
        return
    if not rows:
        click.echo(f"no runs in {root}")
        return
    names = [printable(row["run"].rpartition("/")[2]) for row in rows]
    wide, states = max(map(len, names)), max(len(row["state"]) for row in rows)
    click.echo(
        f"{'run':{wide}}  {'state':{states}}  ranks    step  steps/s  {'started':<16}      took  command"
    )
    for name, row in zip(names, rows, strict=True):
        click.echo(f"{name:{wide}}  {row['state']:{states}}  {_columns(row)}  {row['command']}")


def _columns(row: dict[str, Any]) -> str:
    step = "-" if row["step"] is None else row["step"]
    speed = f"{row['steps_per_second']:.3g}" if row["steps_per_second"] else "-"
    started = time.strftime("%Y-%m-%d %H:%M", time.localtime(row["started"]))
    hours, rest = divmod(int(row["seconds"]), 3600)
    took = f"{hours}:{rest // 60:02}:{rest % 60:02}"
    return f"{row['ranks']:>5}  {step:>6}  {speed:>7}  {started:<16}  {took:>8}"
