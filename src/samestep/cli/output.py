"""Shared by all commands: the option -h, output as tables, JSON and progress, and the handling of errors."""

import importlib.util
import json
import math
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from shutil import get_terminal_size
from textwrap import fill
from threading import Event, Thread
from typing import Any

import click

from samestep.errors import SamestepError, UsageError
from samestep.start.scan import reads_arguments
from samestep.start.signals import restore_sigchld
from samestep.text import reason_of

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
# also characters that reverse the direction of text, and separators that may break a line
_CONTROL = re.compile(r"[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_NUMBER = re.compile(r"[0-9.,:]*(e[+-][0-9]+)?( [kMG]B| %| m?s)?|-")
_LAST_COLUMN = 10  # the least width of a table's last column
_BAR, _LEAST_BAR = 30, 4  # the width of a progress bar


class _Help(click.HelpFormatter):
    """Help as wide as the terminal; on a narrow terminal the text is below the option."""

    def __init__(self) -> None:
        super().__init__(width=min(80, room(80)) - 2)

    def write_dl(self, rows: Any, col_max: int = 30, col_spacing: int = 2) -> None:
        super().write_dl(rows, col_max if self.width > 60 else 4, col_spacing)


class _Verb(click.Command):
    """A command whose errors are a single line that begins with its name."""

    def get_help(self, ctx: click.Context) -> str:
        self.format_help(ctx, formatter := _Help())
        return formatter.getvalue().rstrip("\n")

    def main(self, args: Any = None, prog_name: Any = None, *more: Any, **settings: Any) -> Any:
        restore_sigchld()
        try:
            return super().main(args, prog_name, *more, **settings | {"standalone_mode": False})
        except click.ClickException as error:
            example = re.search("^ *(samestep .*)", self.help or "", re.MULTILINE)
            hint = f"see `{prog_name or self.name} --help`"
            names = {param.name for param in self.params}
            if isinstance(error, click.MissingParameter) and example:
                hint = f"write for instance `{example[1]}`"
            elif isinstance(error, click.NoSuchOption) and "options" in names:
                longer = [name for param in self.params for name in param.opts if error.option_name in name]
                error = click.NoSuchOption(error.option_name)
                wanted = f"write {' or '.join(longer)}; " if longer else ""
                hint = f"{wanted}--option gives sbatch its own, as --option --gres=gpu:1; {hint}"
            elif isinstance(error, click.NoSuchOption) and "args" in names:
                hint = f"options of the script stand after it; {hint}"
            message, code = f"{_sentence(error)}; {hint}", 2
        except SamestepError as error:
            message, code = str(error), 2 if isinstance(error, UsageError) else 1
        except OSError as error:
            message, code = f"{error.filename or 'the output'} cannot be used ({reason_of(error)})", 1
        except click.Abort:
            raise KeyboardInterrupt from None
        click.echo(harmless(f"{self.name}: {message}"), err=True)
        raise SystemExit(code)

    def invoke(self, ctx: click.Context) -> Any:
        for param in self.params:
            name = max(param.opts, key=len) if isinstance(param, click.Option) else param.human_readable_name
            given: Any = ctx.params.get(param.name or "")
            for value in given if param.multiple else (given,):
                if value == "" or value != value:
                    raise UsageError(f"{name} is {value or 'empty'}; write a value, or leave it out")
        return super().invoke(ctx)


def _sentence(error: click.ClickException) -> str:
    """The message of click on a single line, in lower case."""
    parts = " ".join(error.format_message().split()).rstrip(".").removesuffix(" range").split(". ")
    return "; ".join(part[:1].lower() + part[1:] for part in parts).replace("; (", " (")


def verb(name: str, **settings: Any) -> Callable[[Callable[..., None]], click.Command]:
    """Decorator for a command; a UsageError exits with 2, other errors of samestep with 1, Ctrl-C with 130."""
    return click.command(name, cls=_Verb, context_settings={"help_option_names": ["-h", "--help"]} | settings)


def print_json(document: dict[str, object], indent: int | None = None) -> None:
    """Print a JSON object with a schema_version; numbers that are not finite become null."""
    click.echo(json.dumps(_finite({"schema_version": 1} | document), indent=indent, allow_nan=False))


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def progress(total: int | None) -> Iterator[Callable[[int, str, str], None]]:
    """A line on a terminal, elsewhere one for each new text: told how many are done of a total, if known."""
    if not _is_live():
        said = set()

        def told(done: int, text: str, more: str) -> None:
            if text not in said:
                click.echo(text + more, err=True)
            said.add(text)

        yield told
        return
    with _Line(total, end="\n") as line:
        yield line.told
        line.done = total or 0


@contextmanager
def working(task: str) -> Iterator[None]:
    """While entered, a terminal shows what is being done."""
    if not _is_live():
        yield
        return
    with _Line(None, end="\r\x1b[K") as line:
        line.told(0, f"{task} ...", "")
        yield


def _is_live() -> bool:
    return sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"


class _Line:
    """A terminal's last line, drawn again four times a second: a text, a bar if there is a total, and the time."""

    def __init__(self, total: int | None, end: str) -> None:
        self.done, self._text, self._total, self._end = 0, "", total, end
        self._began, self._is_over = time.monotonic(), Event()
        self._thread = Thread(target=self._redraw, daemon=True)

    def __enter__(self) -> "_Line":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()
        click.echo(self._end, nl=False, err=True)

    def told(self, done: int, text: str, more: str) -> None:
        self.done, self._text = done, text + more

    def _redraw(self) -> None:
        is_over = False
        while not is_over:
            is_over = self._is_over.wait(0.25)
            minutes, seconds = divmod(int(time.monotonic() - self._began), 60)
            columns = room() - 1
            wide = max(_LEAST_BAR, min(_BAR, columns - len(f"{self._text} [] {minutes}:{seconds:02}")))
            full = round(wide * min(1, self.done / self._total)) if self._total else 0
            bar = f" [{'=' * full:{wide}}]" if self._total else ""
            text = f"{self._text}{bar} {minutes}:{seconds:02}"
            shown = text if len(text) <= columns else self._text[:columns]
            click.echo(f"\r{shown}\x1b[K", nl=False, err=True)


def room(otherwise: int = 79) -> int:
    """Columns of the terminal."""
    return get_terminal_size((otherwise, 0)).columns


def print_sentence(text: str, err: bool = False) -> None:
    """Print a long line; a terminal gets it broken between words, with the rest of it indented."""
    is_live = (sys.stderr if err else sys.stdout).isatty()
    indent = " " * (len(text) - len(text.lstrip()) + 2)
    broken = fill(text, room(), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    click.echo(broken if is_live else text, err=err)


def print_table(rows: Sequence[Sequence[object]], err: bool = False) -> None:
    """Print rows in columns, the heading first; on a narrow terminal, print each cell on a line."""
    columns = [[str(cell) for cell in column] for column in zip(*rows, strict=True)]
    wide = [max(map(len, column)) for column in columns]
    right = [all(map(_NUMBER.fullmatch, column[1:])) for column in columns]
    # words in the last column may be long: they may continue in the terminal's next line
    last = wide[-1] if right[-1] else min(wide[-1], _LAST_COLUMN)
    if sum(wide[:-1]) + 2 * len(wide[1:]) + last > room(sys.maxsize):
        for row in zip(*(column[1:] for column in columns), strict=True):
            click.echo(f"{rows[0][0]} {row[0]}", err=err)
            for heading, cell in zip(rows[0][1:], row[1:], strict=True):
                if not cell:
                    continue
                text = fill(f"{heading} {cell}", room(), initial_indent="  ", subsequent_indent="    ")
                click.echo(text, err=err)
        return
    for row in zip(*columns, strict=True):
        cells = zip(row, wide, right, strict=True)
        line = "  ".join(f"{cell:{'>' if number else '<'}{width}}" for cell, width, number in cells)
        click.echo(line.rstrip(), err=err)


def harmless(text: object) -> str:
    """Untrusted text for a terminal: without colours, other control characters escaped."""
    return _CONTROL.sub(lambda match: repr(match[0])[1:-1], _COLOURS.sub("", str(text)))


class NoScript(UsageError):
    """There is no such script, or it cannot be read."""


def check_script(script: str, is_module: bool) -> None:
    """Refuse a script that does not exist now, instead of after minutes or in a queue."""
    path = Path(script)
    if not is_module and path.is_file() and not os.access(path, os.R_OK):
        raise NoScript(f"{script} cannot be read (permission denied)")
    if path.suffix == ".ipynb" and path.is_file():
        raise UsageError(
            f"{script} is a notebook, not a script; export it (jupyter nbconvert --to script {script}), or train in it "
            "by samestep.launch, see docs/launch.md"
        )
    if is_module or path.is_file() or (path / "__main__.py").is_file():
        return
    if path.is_dir():
        raise UsageError(f"{script} is a directory without a __main__.py; write the path of a script in it")
    if not path.exists():
        where = "" if path.is_absolute() else f" in {Path.cwd()}"
        module = Path(*script.split(".")).with_suffix(".py")
        wanted = f"-m {script}" if module.is_file() else "its path"
        raise NoScript(f"there is no script {script!r}{where}; write {wanted}")


def check_module(name: str) -> None:
    """Refuse a module that this Python does not find from the working directory."""
    # Only the first part of the name: to find the others, Python runs the package's own code.
    top, path = name.partition(".")[0], sys.path
    sys.path = [os.getcwd(), *path]
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # the name is empty, or that of a module without a spec
        return
    finally:
        sys.path = path
    if spec is None:
        raise UsageError(
            f"there is no module {top!r} in {Path.cwd()} or among the packages of {sys.executable}; install it, or "
            "change to the directory that holds it"
        )
    places = [Path(place) for place in spec.submodule_search_locations or ()]
    if name == top and places and not any([*place.glob("__main__.*")] for place in places):
        raise UsageError(
            f"{top} is a package without a __main__.py; write -m {top}.train, or what its module is named"
        )


def sizes_of(option: str, text: str) -> list[int]:
    """The numbers of processes in an option's value, without repetitions."""
    if not all(sizes := list(dict.fromkeys(numbers(option, text, "numbers of processes")))):
        raise UsageError(f"{option} {text} contains 0 processes; write numbers such as 1,2")
    return sizes


def ranks_of(option: str, text: str, size: int) -> list[int]:
    """The ranks in an option's value, for a run with `size` ranks."""
    ranks = numbers(option, text, "ranks")
    if max(ranks) >= size:
        raise UsageError(f"{option} {text} names rank {max(ranks)}, but there are {size}; count from 0")
    return ranks


def numbers(option: str, text: str, noun: str) -> list[int]:
    """The numbers in an option's value such as 0,2."""
    if not re.fullmatch(r"[0-9]{1,7}(,[0-9]{1,7})*", text):
        raise UsageError(f"{option} {text} is not a list of {noun}; write numbers such as 1,2")
    return [int(part) for part in text.split(",")]


def remark_on_options(
    name: str, command: click.Command, script: str, args: Sequence[str], *, has_refused: bool = False
) -> None:
    """Say where an option of the command stands behind a script that reads no arguments, or that `has_refused` them."""
    options = {option for param in command.params for option in param.opts if option.startswith("-")}
    ours = [word for word in args if word.partition("=")[0] in options]
    if ours and has_refused == reads_arguments(Path(script)):
        why = "may know no such option" if has_refused else "seems to read no arguments"
        words = [ours[0], "...", script] if has_refused else [*args, script]
        click.echo(
            f"samestep: {ours[0]} is given to {Path(script).name}, which {why}; write options of {name} before it: "
            f"{name} {shlex.join(words)}",
            err=True,
        )
