"""`samestep convert`: prints the patch that makes a serial script run on any number of processes, or applies it."""

import sys
from pathlib import Path

import click

from samestep.cli.output import check_script, verb
from samestep.convert.convert import Conversion, convert
from samestep.errors import UsageError
from samestep.files import write_atomically
from samestep.text import counted


@verb("samestep convert")
@click.option("--write", is_flag=True, help="Apply the patch; keep each file it changes as NAME_serial.py.")
@click.argument("script", type=click.Path(path_type=Path))
def command(script: Path, write: bool) -> None:
    """Print a patch that makes SCRIPT, and the files beside it that it imports, run on any number of processes.

    \b
    samestep convert train.py
    samestep convert --write train.py && samestep run -n 2 train.py
    samestep verify --against train_serial.py train.py

    What it does not convert it lists on stderr, with line and reason.

    Exit code: 0 all is converted; 1 something is left to do; 2 SCRIPT cannot be converted.
    """
    check_script(str(script), is_module=False)
    conversion = convert(script, write)
    if not conversion.files:
        click.echo(f"samestep convert: nothing in {script} could be converted", err=True)
    elif write:
        _write(conversion)
    else:
        sys.stdout.buffer.write(conversion.patch().encode("utf-8", "surrogateescape"))
        sys.stdout.flush()
    for note in conversion.notes:
        click.echo(f"note: {note}", err=True)
    if conversion.gaps:
        places = counted(len(conversion.gaps), "place")
        click.echo(f"\nnot complete, {places} left to change by hand:", err=True)
        for gap in conversion.gaps:
            click.echo(f"  {gap}", err=True)
    elif write and script in conversion.files:
        click.echo(f"test it: samestep verify --against {_copy_of(script)} {script}")
    raise SystemExit(1 if conversion.gaps else 0)


def _copy_of(path: Path) -> Path:
    return path.with_name(f"{path.stem}_serial{path.suffix}")


def _write(conversion: Conversion) -> None:
    copies = {path: _copy_of(path) for path in conversion.files}
    for path, copy in copies.items():
        if copy.exists() and copy.read_bytes() != conversion.files[path][0]:
            raise UsageError(
                f"{copy} exists, and the copy of {path} would replace it; move it, then convert again"
            )
    for path, (before, after) in conversion.files.items():
        write_atomically(copies[path], before)
        write_atomically(path, after)
        click.echo(f"{path}: converted; the script as it was is {copies[path].name}")
