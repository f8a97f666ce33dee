"""`samestep convert`: prints the patch that makes a serial script run on any number of processes, or applies it."""

import sys
from pathlib import Path

import click

from samestep.cli.output import check_script, print_sentence, verb
from samestep.convert.convert import Conversion, convert
from samestep.errors import UsageError
from samestep.files import write_atomically
from samestep.start.scan import as_module, imports_relatively
from samestep.text import counted


@verb("samestep convert")
@click.option("--write", is_flag=True, help="Apply the patch; keep each file it changes as NAME_serial.py.")
@click.option("-m", "--module", "is_module", is_flag=True, help="SCRIPT is a module's name, as in python -m.")
@click.argument("script")
def command(script: str, write: bool, is_module: bool) -> None:
    """Print a patch that makes SCRIPT, and the files of its project that it imports, run on any number of processes.

    \b
    samestep convert train.py
    samestep convert --write train.py && samestep run -n 2 train.py
    samestep verify --against train_serial.py train.py
    samestep convert -m package.train

    What it does not convert it lists on stderr, with line and reason.

    Exit code: 0 all is converted; 1 something is left to do; 2 SCRIPT cannot be converted.
    """
    path = Path(*script.split(".")) if is_module else Path(script)
    path = path.with_suffix(".py") if is_module and not path.is_dir() else path
    check_script(str(path), is_module=False)
    path = path / "__main__.py" if path.is_dir() else path
    conversion = convert(path, write, is_module)
    if not conversion.files:
        click.echo(f"samestep convert: nothing in {script} could be converted", err=True)
    elif write:
        _write(conversion, path)
    else:
        sys.stdout.buffer.write(conversion.patch().encode("utf-8", "surrogateescape"))
        sys.stdout.flush()
    for note in conversion.notes:
        print_sentence(f"note: {note}", err=True)
    if conversion.gaps:
        places = counted(len(conversion.gaps), "place")
        click.echo(f"\nnot complete, {places} left to change by hand:", err=True)
        for gap in conversion.gaps:
            print_sentence(f"  {gap}", err=True)
    elif write and conversion.files:
        copy = _copy_of(path)
        before, name, serial = "", str(path), str(copy)
        if is_module:
            name, serial = f"-m {script}", ".".join(copy.with_suffix("").parts)
        elif imports_relatively(path):
            (before, name), (_, serial) = as_module(path), as_module(copy)
        against = f"--against {serial.removeprefix('-m ')} {name}"
        click.echo(f"test it: {before}samestep verify {against}")
        click.echo(f"or shorter: {before}samestep verify --steps 50 {against}")
    raise SystemExit(1 if conversion.gaps else 0)


def _copy_of(path: Path) -> Path:
    return path.with_name(f"{path.stem}_serial{path.suffix}")


def _write(conversion: Conversion, script: Path) -> None:
    """Write what was converted, and the copies; the script has one too, since `verify --against` starts from it."""
    same = script.read_bytes()
    conversion.files.setdefault(script, (same, same))
    copies = {path: _copy_of(path) for path in conversion.files}
    for path, copy in copies.items():
        if copy.exists() and copy.read_bytes() != conversion.files[path][0]:
            raise UsageError(
                f"{copy} exists, and the copy of {path} would replace it; move it, then convert again"
            )
    for path, (before, after) in conversion.files.items():
        write_atomically(copies[path], before)
        if after != before:
            write_atomically(path, after)
            click.echo(f"{path}: converted; the file as it was is {copies[path].name}")
