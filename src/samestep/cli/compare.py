"""`samestep compare`: reads weights files without running their code and prints what differs between them."""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import chain, count, islice, product
from string import ascii_uppercase
from typing import TYPE_CHECKING, Any, NoReturn

import click

from samestep.cli.output import harmless, print_json, print_table, room, verb, working
from samestep.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from samestep.compare.compare import Comparison, Difference
    from samestep.compare.weights import Weights

_LINES, _TABLES = 20, 4
_DIFFERENT, _UNREADABLE = 1, 2


@verb("samestep compare")
@click.argument("files", nargs=-1, required=True, metavar="A B [C …]")
@click.option(
    "--tolerance", type=click.FloatRange(0), help="Largest relative difference that counts as equal  [none]"
)
@click.option("--all", "everything", is_flag=True, help=f"List every difference, not the {_LINES} largest.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(files: tuple[str, ...], tolerance: float | None, everything: bool, as_json: bool) -> None:
    """Say which tensors differ between checkpoints or weights files, and by how much.

    \b
    samestep compare mnist-1.pt mnist-2.pt
    samestep compare rank-*.pt --tolerance 1e-6
    samestep compare model.safetensors runs/checkpoints --json

    Reads samestep's checkpoints (of a directory the newest good one) and files of torch.save and safetensors,
    without running code from them. Each file is compared with the first. A relative difference is the largest
    absolute difference in a tensor over the largest finite value of that tensor in both files.

    Exit code: 0 same to the bit, or within --tolerance; 1 different; 2 a file cannot be read.
    """
    if len(files) < 2:
        raise UsageError("there is only one file; name two or more")
    if tolerance is not None and not math.isfinite(tolerance):
        raise UsageError(f"--tolerance {tolerance} is not finite; name a number such as 1e-6")
    if missing := [f"{file} does not exist" for file in files if _is_missing(file)]:
        _refuse(missing, as_json)  # before torch is loaded, which takes seconds
    from samestep.compare.compare import compare

    names = list(islice(_names(), len(files)))
    comparisons = []
    with working("comparing"):
        weights = _read(files, as_json)
        for name, other in list(zip(names, weights, strict=True))[1:]:
            pair = (names[0], name)
            comparisons.append(compare(weights[0].state, other.state, tolerance=tolerance, names=pair))
    all_notes = (*(file.notes for file in weights), *(comparison.notes for comparison in comparisons))
    notes = list(dict.fromkeys(chain(*all_notes)))
    is_equal = all(comparison.equal for comparison in comparisons)
    if as_json:
        named = [{"name": name, "path": file} for name, file in zip(names, files, strict=True)]
        facts = {"equal": is_equal, "tolerance": tolerance, "files": named, "notes": notes}
        print_json({**facts, "comparisons": [_facts(comparison) for comparison in comparisons]}, indent=2)
    else:
        for note in notes:
            click.echo(f"note: {note}", err=True)
        for name, file in zip(names, files, strict=True):
            click.echo(f"{name}  {file}")
        _print(comparisons, None if everything else _LINES)
    raise SystemExit(0 if is_equal else _DIFFERENT)


def _read(files: Sequence[str], as_json: bool) -> list["Weights"]:
    """Read all files; if some cannot be read, name each of them and exit."""
    from samestep.compare.weights import read

    weights, unreadable = [], []
    for file in files:
        try:
            weights.append(read(file))
        except CheckpointError as error:
            unreadable.append(str(error))
    if unreadable:
        _refuse(unreadable, as_json)
    return weights


def _is_missing(file: str) -> bool:
    try:
        os.stat(file)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except (OSError, ValueError):  # reading it gives a better error
        pass
    return False


def _refuse(errors: Sequence[str], as_json: bool) -> NoReturn:
    for error in errors:
        click.echo(harmless(f"samestep compare: {error}"), err=True)
    if as_json:
        print_json({"errors": errors})
    raise SystemExit(_UNREADABLE)


def _names() -> Iterator[str]:
    """A, B … Z, AA, AB …"""
    for length in count(1):
        yield from map("".join, product(ascii_uppercase, repeat=length))


def _print(comparisons: Sequence["Comparison"], limit: int | None) -> None:
    unequal = [comparison for comparison in comparisons if comparison.differences]
    for comparison in unequal[:_TABLES]:
        click.echo()
        _print_table(comparison, limit)
        if comparison.cause:
            click.echo(f"\n{click.wrap_text(comparison.cause, width=room(80))}")
    click.echo()
    verdict = str(comparisons[0])
    if len(comparisons) > 1:
        for comparison in comparisons:
            click.echo(f"{comparison.names[1]}  {comparison}")
        differ = [comparison.names[1] for comparison in comparisons if not comparison.equal]
        verdict = f"different from A: {', '.join(differ)}" if differ else "all files are equal"
        click.echo()
    plain = "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
    click.echo(verdict if plain else click.style(verdict, bold=True))


def _print_table(comparison: "Comparison", limit: int | None) -> None:
    """Print the largest differences in the order of the first file; tensors that a file lacks come last."""
    ordered = sorted(comparison.differences, key=lambda difference: difference.kind == "missing")
    largest = sorted(ordered, key=lambda difference: (difference.kind == "missing", -difference.relative))
    kept = set(map(id, largest[:limit]))
    first, other = comparison.names
    rows = [_row(difference, first, other) for difference in ordered if id(difference) in kept]
    print_table([(f"{other} against {first}", "elements", "largest", "relative", "bits"), *rows])
    if hidden := len(comparison.differences) - len(rows):
        click.echo(f"and {hidden} smaller (--all lists them)")


def _row(d: "Difference", first: str, other: str) -> tuple[object, ...]:
    from samestep.compare.compare import amount

    match d.kind:
        case "missing":
            text = f"only in {first if d.b is None else other}: {d.a or d.b}"
        case "shape":
            text = f"shape {d.a} and {d.b}"
        case "dtype":
            values = f"{amount(d.relative, d.nans)} relative" if d.elements else "equal values"
            text = f"{d.a} and {d.b}, {values}"
        case "value" if d.size == 1:
            text = f"{d.a} and {d.b}"
        case _:
            largest, relative = (amount(value, d.nans) for value in (d.absolute, d.relative))
            return d.name, f"{d.elements} of {d.size}", largest, relative, d.bits
    return d.name, text, "", "", ""


def _facts(comparison: "Comparison") -> dict[str, Any]:
    facts = ("verdict", "equal", "cause", "tensors", "values", "bytes")
    return {
        **dict(zip("ab", comparison.names, strict=True)),
        **{name: getattr(comparison, name) for name in facts},
        "sentence": str(comparison),
        "differences": [{"layer": d.layer} | asdict(d) for d in comparison.differences],
    }
