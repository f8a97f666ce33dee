"""`samestep demo`: one small network trained at 1 and at 2 processes, side by side."""

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

import click

from samestep.cli.output import HELP, finite, print_json
from samestep.errors import SamestepError
from samestep.measure.trial import end_on_signals

if TYPE_CHECKING:
    from samestep.measure.demo import Result, Run, Setup

_NEXT = """\
Next: read the script, {script}
      change seven lines of yours; `samestep run --help` says how it is started
      samestep run -n 2 train.py
"""


@click.command(context_settings=HELP)
@click.option(
    "--epochs", default=20, show_default=True, type=click.IntRange(1), help="Passes over the digits."
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
    click.echo(
        f"A convolutional network with BatchNorm and dropout learns handwritten digits in {epochs} epochs,\n"
        "once by one process and once by two.",
        err=as_json,
    )
    end_on_signals()
    try:
        result = _trained(epochs)
    except SamestepError as error:
        click.echo(f"samestep: {error}", err=True)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    click.echo(_text(result), err=as_json)
    if as_json:
        print_json(_facts(result))
    raise SystemExit(not result.same)


def _trained(epochs: int) -> "Result":
    from samestep.measure.demo import Result, setups, train

    runs: list[Run] = []
    with tempfile.TemporaryDirectory(prefix="samestep-") as directory:
        for setup in setups():
            # The third run is for its speed alone.
            some = epochs if len(runs) < 2 else -(-epochs // 4)
            with _progress(setup, some) as told:
                runs.append(train(setup, Path(directory), some, told))
    return Result(runs[0], runs[1], runs[2] if len(runs) > 2 else None)


@contextmanager
def _progress(setup: "Setup", epochs: int) -> Iterator[Callable[[int, str], None]]:
    """A bar on a terminal; elsewhere one line when a run begins."""
    if not sys.stderr.isatty():
        click.echo(f"{setup} ...", err=True)
        yield lambda epoch, accuracy: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = ("{task.description:22}", BarColumn(), "{task.fields[accuracy]:>7}", TimeElapsedColumn())
    shown = [TextColumn(one) if isinstance(one, str) else one for one in columns]
    with Progress(*shown, console=Console(stderr=True)) as progress:
        bar = progress.add_task(str(setup), total=epochs, accuracy="")
        yield lambda epoch, accuracy: progress.update(bar, completed=epoch, accuracy=accuracy)


def _text(result: "Result") -> str:
    from samestep.measure.demo import SCRIPT, in_words

    rows: dict[str, Callable[[Run], str]] = {
        "processes": lambda run: str(run.setup.processes),
        "cores": lambda run: str(run.setup.cores),
        "best samples/s": lambda run: f"{run.samples_per_second:.0f}",
        "speed-up": lambda run: f"{result.speedup(run):.2f}",
    }
    of_two: dict[str, Callable[[Run], str]] = {
        "training, s": lambda run: f"{run.training_seconds:.1f}",
        "with start-up, s": lambda run: f"{run.seconds:.1f}",
        "test accuracy": lambda run: f"{run.accuracy:.2%}",
        "batches (digest)": lambda run: run.order[:8],
    }
    table = [_row(name, [cell(run) for run in result.runs]) for name, cell in rows.items()]
    table += [_row(name, [cell(result.one), cell(result.two)]) for name, cell in of_two.items()]
    return "\n".join(
        ["", *table, "", fill(in_words(result), 79), "", _NEXT.format(script=SCRIPT), *_verdict(result)]
    )


def _row(name: str, cells: list[str]) -> str:
    return f"{name:18}" + "".join(f"{cell:>11}" for cell in cells)


def _verdict(result: "Result") -> Iterator[str]:
    yield f"1 process and 2 took {result.one.saved['steps']} steps each:"
    yield f"  {'the same' if result.same_batches else 'different'} batches"
    yield f"  {'the same' if result.same_accuracy else 'different'} test accuracy"
    yield (
        f"  largest difference in {result.comparison.contents} "
        f"(weights, BatchNorm, optimizer): {result.largest:g}"
    )
    yield "same to the bit" if result.same else f"{result.comparison}"


def _facts(result: "Result") -> dict[str, object]:
    from samestep.measure.demo import in_words

    return {
        "same": result.same,
        "same_batches": result.same_batches,
        "same_accuracy": result.same_accuracy,
        "largest_difference": finite(result.largest),
        "verdict": result.comparison.verdict,
        "steps": result.one.saved["steps"],
        "speed": in_words(result),
        "runs": [
            {
                "processes": run.setup.processes,
                "cores": run.setup.cores,
                "batches": run.order,
                "epochs": len(run.saved["seconds"]),
                "accuracy": run.accuracy,
                "training_seconds": run.training_seconds,
                "seconds": run.seconds,
                "samples_per_second": run.samples_per_second,
                "speedup": result.speedup(run),
            }
            for run in result.runs
        ],
    }
