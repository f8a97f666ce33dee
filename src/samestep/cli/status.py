"""`samestep status`: shows what each rank of a run does, from its files; of a hung run also from its processes."""

import os
import time
from pathlib import Path

import click

from samestep.cli.output import harmless, print_json, verb
from samestep.files import open_regular
from samestep.hang import ABSENT, LEAST_S, Hang, RankState, find_hang, state_of
from samestep.measure.runs import Run, find_run
from samestep.rundir import pulse_path, stack_path
from samestep.start.sight import look_at
from samestep.text import counted, figures

_MOST_LOOKED_AT = 8


@verb("samestep status")
@click.argument("run", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(run: str | None, as_json: bool) -> None:
    """Say what each rank of RUN does.

    \b
    samestep status
    samestep status runs/1120-2023 --json

    RUN is a directory, or a name that `samestep runs` lists  [the newest].
    """
    target = find_run(run)
    now = time.time()
    facts = target.facts()
    states, ranks = [], []
    for rank, pulse in target.pulses.items():
        age_s = now - pulse.unix  # by the wall clock: the ranks may run on other machines
        states.append(state_of(rank, pulse, age_s + pulse.monotonic - pulse.phase_began))
        place = {"step": pulse.step, "epoch": pulse.epoch + 1}
        ranks.append({"rank": rank, "device": pulse.device, **place, "age_s": age_s})
    absent = [rank for rank in target.logs if target.pulses and rank not in target.pulses]
    states += [RankState(rank, -1, "start", "", 0, 0.0, does=ABSENT) for rank in absent]
    hang = None if target.is_over else find_hang(states, target.size, LEAST_S)
    hang = hang and _looked_at(target, hang)
    if as_json:
        print_json({**facts, "by_rank": ranks, "hang": hang and hang.sentence()})
        return
    speed = f", {figures(facts['steps_per_second'])} steps/s" if facts["steps_per_second"] else ""
    if facts["samples_per_second"]:
        speed += f", {facts['samples_per_second']:,.0f} samples/s"
    where = f"{target.command} on {counted(target.size, 'rank')}"
    click.echo(f"{harmless(target.path)}: {target.state}, {where}{speed}")
    for rank, pulse in target.pulses.items():
        none = "no step" if target.is_over else "no step yet"
        step = none if pulse.step < 0 else f"epoch {pulse.epoch + 1}, step {pulse.step}"
        age = "" if target.is_over else f", {now - pulse.unix:.0f} s ago"
        click.echo(f"  rank {rank:<4} {pulse.device:<8} {step}{age}")
    for rank in absent:
        click.echo(f"  rank {rank:<4} {ABSENT}")
    if hang:
        click.echo(hang.sentence())
    if facts["failure"]:
        click.echo(f"\n{facts['failure']}")


def _looked_at(run: Run, hang: Hang) -> Hang:
    """The hang with the lines of its ranks, and with what those do that do not come, as far as they run here."""
    waiting, missing = hang.waiting, hang.missing
    return hang._replace(
        waiting=(*(_seen(run, state) for state in waiting[:1]), *waiting[1:]),
        missing=(*(_seen(run, state) for state in missing[:_MOST_LOOKED_AT]), *missing[_MOST_LOOKED_AT:]),
    )


def _seen(run: Run, state: RankState) -> RankState:
    """The state with what its process does, and its line; unchanged if it runs on another machine."""
    stacks, pulse = stack_path(run.path, state.rank).resolve(), run.pulses.get(state.rank)
    try:
        held = map(os.readlink, Path(f"/proc/{pulse.pid if pulse else 0}/fd").iterdir())
        if pulse is None or str(stacks) not in held:
            return state
        asks = pulse_path(run.path, state.rank)
        with (
            open(open_regular(stacks, 2), "rb") as file,
            open(open_regular(asks, 2, os.O_RDWR), "r+b") as asked,
        ):
            sight = look_at(pulse, asked.fileno(), file.fileno())
    except OSError:
        return state
    return state._replace(line=sight.frame.place if sight.frame else "", does=sight.does)
