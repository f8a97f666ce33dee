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
    found = convert(script, write)
    if not found.files:
        click.echo(f"samestep convert: nothing in {script} could be converted", err=True)
    elif write:
        _write(found)
    else:
        sys.stdout.buffer.write(found.patch().encode("utf-8", "surrogateescape"))
        sys.stdout.flush()
    for note in found.notes:
        click.echo(f"note: {note}", err=True)
    if found.gaps:
        click.echo(f"\nnot complete, {counted(len(found.gaps), 'place')} left to change by hand:", err=True)
        for gap in found.gaps:
            click.echo(f"  {gap}", err=True)
    elif write and script in found.files:
        click.echo(f"test it: samestep verify --against {_copy_of(script)} {script}")
    raise SystemExit(1 if found.gaps else 0)


def _copy_of(path: Path) -> Path:
    """Where a file is kept as it was."""
    return path.with_name(f"{path.stem}_serial{path.suffix}")


def _write(found: Conversion) -> None:
    copies = {path: _copy_of(path) for path in found.files}
    for path, copy in copies.items():
        if copy.exists() and copy.read_bytes() != found.files[path][0]:
            raise UsageError(
                f"{copy} exists, and the copy of {path} would replace it; move it, then convert again"
            )
    for path, (before, after) in found.files.items():
        write_atomically(copies[path], before)
        write_atomically(path, after)
        click.echo(f"{path}: converted; the script as it was is {copies[path].name}")
