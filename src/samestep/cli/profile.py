"""`samestep profile`: one trace of chosen steps on chosen ranks, for Perfetto or Chrome."""

import os
import re
from pathlib import Path
from typing import Any

import click

from samestep.cli.output import check_script, ranks_of, verb, working
from samestep.errors import UsageError
from samestep.measure.trial import end_on_signals
from samestep.placement.devices import visible_devices
from samestep.text import size


@verb("samestep profile", allow_interspersed_args=False)
@click.option(
    "-n", "count", metavar="N", type=click.IntRange(1), help="Processes  [one for each device, or 2]"
)
@click.option("--steps", default="20:25", metavar="A:B", help="Record steps A up to B - 1  [20:25]")
@click.option("--ranks", metavar="0,3", help="Record these ranks  [all]")
@click.option(
    "-o",
    "--out",
    default="trace.json",
    type=click.Path(dir_okay=False),
    help="The trace, which replaces an older one  [trace.json]",
)
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module's name, as in python -m.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def command(script: str, args: tuple[str, ...], count: int | None, **options: Any) -> None:
    """Record some steps of SCRIPT on all ranks as one trace, with steps, phases and buckets by name.

    \b
    samestep profile -n 2 train.py --epochs 1
    samestep profile -n 4 --steps 100:103 --ranks 0,3 train.py

    Open the file in https://ui.perfetto.dev or chrome://tracing. SCRIPT runs to the end of the last recorded step.
    """
    from samestep.measure.profile import profile

    steps = re.fullmatch(r"(\d{1,9}):(\d{1,9})", options["steps"])
    if not steps or int(steps[1]) >= int(steps[2]):
        raise UsageError(f"--steps {options['steps']} is not a range; write for instance --steps 20:25")
    count = count or len(visible_devices(os.environ)) or 2
    ranks = ranks_of("--ranks", options["ranks"], count) if options["ranks"] else []
    out = Path(options["out"])
    if not out.parent.is_dir():
        raise UsageError(f"-o {out} is in no directory: {out.parent} does not exist")
    check_script(script, options["module"])
    words = [*(["-m"] * options["module"]), script, *args]
    with end_on_signals(), working(f"recording {script}"):
        profile(words, count, int(steps[1]), int(steps[2]) - 1, ranks, out)
    click.echo(f"{out} ({size(out.stat().st_size)}): open it in https://ui.perfetto.dev or chrome://tracing")
