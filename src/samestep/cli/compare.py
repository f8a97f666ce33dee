"""`samestep compare`: reads weights files without running their code and prints what differs between them."""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import count, groupby, islice, product
from string import ascii_uppercase
from textwrap import fill
from typing import TYPE_CHECKING, Any

import click

from samestep.cli.output import print_json, room, verb
from samestep.errors import CheckpointError

if TYPE_CHECKING:
    from samestep.compare.compare import Comparison, Difference
    from samestep.compare.weights import Weights

_LINES = 20
_WIDE = 80  # columns of the table; on a narrower terminal each difference is a line or two
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
        raise click.UsageError("there is only one file; name two or more")
    if tolerance is not None and not math.isfinite(tolerance):
        raise click.UsageError(f"--tolerance {tolerance} is not finite; name a number such as 1e-6")
    report = _compared(files, _read(files, as_json), tolerance)
    if as_json:
        print_json(_document(report, tolerance), indent=2)
    else:
        _print(report, None if everything else _LINES)
    raise SystemExit(_DIFFERENT if len(report.groups) > 1 else 0)


@dataclass(frozen=True)
class _Report:
    files: dict[str, str]  # by name: A, B …
    comparisons: Sequence["Comparison"]  # of each file after the first with the first
    groups: Sequence[Sequence[int]]  # of equal files; the group of the first file comes first
    notes: Sequence[str]

    @property
    def clusters(self) -> list[list[str]]:
        return [[[*self.files][index] for index in group] for group in self.groups]


def _read(files: Sequence[str], as_json: bool) -> list["Weights"]:
    """All files; where one cannot be read, say so for each of them and exit."""
    from samestep.compare.weights import read

    found, unreadable = [], []
    for file in files:
        try:
            found.append(read(file))
        except CheckpointError as error:
            unreadable.append(str(error))
            click.echo(unreadable[-1], err=True)
    if unreadable:
        if as_json:
            print_json({"errors": unreadable})
        raise SystemExit(_UNREADABLE)
    return found


def _compared(files: Sequence[str], found: Sequence["Weights"], tolerance: float | None) -> _Report:
    from samestep.compare.compare import compare

    names = list(islice(_names(), len(files)))

    @cache
    def against(one: int, other: int) -> "Comparison":
        pair = (names[one], names[other])
        return compare(found[one].state, found[other].state, tolerance=tolerance, names=pair)

    groups: list[list[int]] = []
    for index in range(len(files)):
        group = next((group for group in groups if against(group[0], index).equal), None)
        if group is None:
            groups.append(group := [])
        group.append(index)
    comparisons = [against(0, index) for index in range(1, len(files))]
    notes = [note for weights in found for note in weights.notes]
    notes += [note for comparison in comparisons for note in comparison.notes]
    return _Report(dict(zip(names, files, strict=True)), comparisons, groups, list(dict.fromkeys(notes)))


def _names() -> Iterator[str]:
    """A, B … Z, AA, AB …"""
    for length in count(1):
        yield from map("".join, product(ascii_uppercase, repeat=length))


def _print(report: _Report, limit: int | None) -> None:
    for note in report.notes:
        click.echo(f"note: {note}", err=True)
    width = max(map(len, report.files))
    for name, file in report.files.items():
        click.echo(f"{name:{width}}  {file}")
    # Of a group of files that differ from the first, only one table is shown.
    for index in [*report.groups[0][1:], *(group[0] for group in report.groups[1:])]:
        comparison = report.comparisons[index - 1]
        if comparison.differences:
            click.echo("\n" + "\n".join(_table(comparison, limit)))
        if comparison.cause:
            click.echo(f"\n{click.wrap_text(comparison.cause, width=room(_WIDE))}")
    click.echo()
    verdict = str(report.comparisons[0])
    if len(report.files) > 2:
        for comparison in report.comparisons:
            click.echo(f"{comparison.names[1]:{width}}  {comparison}")
        verdict = _grouping(report.clusters)
        click.echo()
    plain = "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
    click.echo(verdict if plain else click.style(verdict, bold=True))


def _grouping(clusters: Sequence[Sequence[str]]) -> str:
    """A = C, B differs"""
    alike = [" = ".join(cluster) for cluster in clusters if len(cluster) > 1]
    single = [cluster[0] for cluster in clusters if len(cluster) == 1]
    if not alike:
        return f"all differ: {', '.join(single)}"
    return ", ".join(alike) + (f", {' and '.join(single)} differ{'s' * (len(single) == 1)}" if single else "")


def _table(comparison: "Comparison", limit: int | None) -> Iterator[str]:
    """The largest differences in the order of the first file, under the name of their layer."""
    largest = sorted(comparison.differences, key=lambda difference: -difference.relative)[:limit]
    kept = set(map(id, largest))
    shown = [difference for difference in comparison.differences if id(difference) in kept]
    one, other = comparison.names
    heading = f"{f'{other} against {one}':26}{'elements':>22}{'largest':>11}{'relative':>11}{'bits':>10}"
    yield heading if room(_WIDE) >= _WIDE else f"{other} against {one}"
    for layer, members in groupby(shown, key=lambda difference: difference.layer):
        if layer:
            yield layer
        for difference in members:
            yield _row(difference, one, other)
    if hidden := len(comparison.differences) - len(shown):
        yield f"and {hidden} smaller (--all lists them)"


def _row(d: "Difference", one: str, other: str) -> str:
    from samestep.compare.compare import amount

    label = f"  {d.name.removeprefix(f'{d.layer}.')}" if d.layer else d.name
    match d.kind:
        case "missing":
            text = f"only in {one if d.b is None else other}: {d.a or d.b}"
        case "shape":
            text = f"shape {d.a} and {d.b}"
        case "dtype":
            values = f"{amount(d.relative, d.nans)} relative" if d.elements else "equal values"
            text = f"{d.a} and {d.b}, {values}"
        case "value" if d.size == 1:
            text = f"{d.a} and {d.b}"
        case _:
            elements = f"{d.elements} of {d.size}"
            if room(_WIDE) < _WIDE:
                text = (
                    f"{elements}, largest {amount(d.absolute, d.nans)}, relative {amount(d.relative, d.nans)}"
                )
                return fill(f"{label.strip()} {text}, bits {d.bits}", room(_WIDE), subsequent_indent="    ")
            numbers = f"{amount(d.absolute, d.nans):>11}{amount(d.relative, d.nans):>11}{d.bits:>10}"
            return f"{label:26}{elements:>{max(0, 48 - max(26, len(label)))}}{numbers}"
    return f"{label:26}  {text}" if room(_WIDE) >= _WIDE else f"{label} {text}"


def _document(report: _Report, tolerance: float | None) -> dict[str, Any]:
    facts = ("verdict", "equal", "cause", "tensors", "values", "bytes")
    return {
        "equal": len(report.groups) == 1,
        "tolerance": tolerance,
        "files": [{"name": name, "path": file} for name, file in report.files.items()],
        "clusters": report.clusters,
        "notes": report.notes,
        "comparisons": [
            {
                **dict(zip("ab", found.names, strict=True)),
                **{name: getattr(found, name) for name in facts},
                "sentence": str(found),
                "differences": [{"layer": d.layer} | asdict(d) for d in found.differences],
            }
            for found in report.comparisons
        ],
    }
