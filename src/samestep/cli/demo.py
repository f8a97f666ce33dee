"""`samestep demo`: one small network trained at 1 and at 2 processes, side by side."""

import tempfile
from pathlib import Path
from textwrap import fill

import click

from samestep.cli.output import progress, verb
from samestep.measure.trial import end_on_signals
from samestep.text import counted

_NEXT = """\
Next: read the script, {script}
      change seven lines of yours; `samestep run --help` says how it is started
      samestep run -n 2 train.py
"""


@verb("samestep")
@click.option(
    "--epochs", metavar="K", default=20, type=click.IntRange(1), help="Passes over the digits  [20]"
)
def command(epochs: int) -> None:
    """Train a small network at 1 and 2 processes; compare batches, accuracy, weights and speed.

    \b
    samestep demo
    samestep demo --epochs 5

    It needs no download and no GPU, takes about half a minute, and leaves no files.

    Exit code: 0 the runs are the same to the bit; 1 they differ, or one failed.
    """
    from samestep.measure.demo import SCRIPT, Run, compared, setups, speeds, table, train

    click.echo(
        "A convolutional network with BatchNorm and dropout learns handwritten digits in "
        f"{counted(epochs, 'epoch')},\n"
        "once by one process and once by two."
    )
    runs: list[Run] = []
    with end_on_signals(), tempfile.TemporaryDirectory(prefix="samestep-") as directory:
        for setup in setups():
            # the third run only measures speed
            num_epochs = epochs if len(runs) < 2 else -(-epochs // 4)
            with progress(num_epochs) as report:
                runs.append(train(setup, Path(directory), num_epochs, report))
    is_same, verdict = compared(runs)
    next_steps = _NEXT.format(script=SCRIPT)
    click.echo("\n".join(["", *table(runs), "", fill(speeds(runs), 79), "", next_steps, *verdict]))
    raise SystemExit(not is_same)
