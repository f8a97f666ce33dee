"""`samestep demo`: one small network trained at 1 and at 2 processes, side by side."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import click

from samestep.cli.output import print_json, progress, verb
from samestep.measure.trial import end_on_signals
from samestep.text import counted

if TYPE_CHECKING:
    from samestep.measure.demo import Result

_ROWS = {
    "processes": "{processes}",
    "cores": "{cores}",
    "samples/s": "{samples_per_second:.0f}",
    "speed-up": "{speedup:.2f}",
}
_ROWS_OF_TWO = {
    "training, s": "{training_seconds:.1f}",
    "with start, s": "{seconds:.1f}",
    "test accuracy": "{accuracy:.2%}",
    "batches": "{batches:.8}",
}
_NEXT = """\
Next: read the script, {script}
      change seven lines of yours; `samestep run --help` says how it is started
      samestep run -n 2 train.py
"""


@verb("samestep")
@click.option(
    "--epochs",
    metavar="K",
    default=20,
    show_default=True,
    type=click.IntRange(1),
    help="Passes over the digits.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; the text goes to stderr.")
def command(epochs: int, as_json: bool) -> None:
    """Train a small network at 1 and 2 processes; compare batches, accuracy, weights and speed.

    \b
    samestep demo
    samestep demo --epochs 5 --json

    It needs no download and no GPU, takes about half a minute, and leaves no files.

    Exit code: 0 the runs are the same to the bit; 1 they differ, or one failed.
    """
    from samestep.measure.demo import Result, Run, setups, train

    click.echo(
        "A convolutional network with BatchNorm and dropout learns handwritten digits in "
        f"{counted(epochs, 'epoch')},\n"
        "once by one process and once by two.",
        err=as_json,
    )
    runs: list[Run] = []
    with end_on_signals(), tempfile.TemporaryDirectory(prefix="samestep-") as directory:
        for setup in setups():
            # The third run is for its speed alone.
            some = epochs if len(runs) < 2 else -(-epochs // 4)
            with progress(some) as told:
                runs.append(train(setup, Path(directory), some, told))
        result = Result(runs)
        click.echo(_text(result), err=as_json)
    if as_json:
        print_json(result.facts)
    raise SystemExit(not result.facts["same"])


def _text(result: "Result") -> str:
    from samestep.measure.demo import SCRIPT

    facts, comparison = result.facts, result.comparison
    table = [_row(name, cell, facts["runs"]) for name, cell in _ROWS.items()]
    table += [_row(name, cell, facts["runs"][:2]) for name, cell in _ROWS_OF_TWO.items()]
    verdict = [
        f"1 process and 2 took {facts['steps']} steps each:",
        f"  {'the same' if facts['same_batches'] else 'different'} batches",
        f"  {'the same' if facts['same_accuracy'] else 'different'} test accuracy",
        f"  largest difference in {comparison.contents} (weights, BatchNorm, optimizer): "
        f"{facts['largest_difference']:g}",
        "same to the bit" if facts["same"] else str(comparison),
    ]
    return "\n".join(["", *table, "", fill(facts["speed"], 79), "", _NEXT.format(script=SCRIPT), *verdict])


def _row(name: str, cell: str, runs: Sequence[dict[str, Any]]) -> str:
    return f"{name:13}" + "".join(f"{cell.format(**run):>9}" for run in runs)  # 40 characters
