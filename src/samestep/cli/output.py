"""What the commands share: the option -h, and how they print JSON and errors."""

import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager

import click

from samestep.errors import UsageError
from samestep.text import reason_of

HELP = {"help_option_names": ["-h", "--help"]}


def print_json(document: dict[str, object], indent: int | None = None) -> None:
    """One JSON object with a schema_version."""
    click.echo(json.dumps({"schema_version": 1} | document, indent=indent, allow_nan=False))


def finite(value: object) -> object:
    """The same value with null, which JSON has, for every NaN and infinity in it, which JSON lacks."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def numbers(option: str, text: str, noun: str) -> list[int]:
    """The numbers in an option's value such as 0,2."""
    if not re.fullmatch(r"[0-9]{1,7}(,[0-9]{1,7})*", text):
        raise UsageError(f"{option} {text} is not a list of {noun}; write numbers such as 1,2")
    return [int(part) for part in text.split(",")]


@contextmanager
def errors_of(verb: str) -> Iterator[None]:
    """Print a UsageError as one line and exit with 2; likewise a file that cannot be used, and exit with 1."""
    try:
        yield
    except UsageError as error:
        click.echo(f"samestep {verb}: {error}", err=True)
        raise SystemExit(2) from None
    except OSError as error:
        click.echo(f"samestep {verb}: {error.filename} cannot be used ({reason_of(error)})", err=True)
        raise SystemExit(1) from None
