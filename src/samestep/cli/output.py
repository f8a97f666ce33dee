"""What the commands share: how they print JSON, tables and errors."""

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import click

from samestep.errors import UsageError

HELP = {"help_option_names": ["-h", "--help"]}


def print_json(document: dict[str, object], indent: int | None = None) -> None:
    """One JSON object with a schema_version; null stands for numbers that are not finite, which JSON lacks."""
    click.echo(json.dumps({"schema_version": 1} | document, indent=indent, default=str, allow_nan=False))


def finite(value: object) -> object:
    """The same value with null for every NaN and infinity in it."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_table(rows: Sequence[Sequence[object]], left: Sequence[int] = ()) -> None:
    """Columns as wide as their widest cell, to the right except those in `left`."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        aligned = (
            f"{cell:<{width}}" if column in left else f"{cell:>{width}}"
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        click.echo("  ".join(aligned).rstrip())


@contextmanager
def errors_of(verb: str) -> Iterator[None]:
    """Print a UsageError as one line and exit with 2."""
    try:
        yield
    except UsageError as error:
        click.echo(f"samestep {verb}: {error}", err=True)
        raise SystemExit(2) from None
