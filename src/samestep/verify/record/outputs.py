"""Records what a script prints, writes to text files and saves, with its line and the place in the training."""

import builtins
import inspect
import io
import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch

import samestep
from samestep.train.group.control import users_line
from samestep.verify.record import wrap
from samestep.verify.record.facts import numbers_in

_MOST_LINES = 10_000
_MOST_LETTERS = 500
_MOST_NUMBERS = 200  # of a saved file
_OPEN = inspect.signature(open)
_SAVING: Mapping[tuple[Any, str], Callable[..., tuple[Any, Any]]] = {  # the path and the state of a call
    (torch, "save"): lambda obj, f, *_, **__: (f, obj),
    (samestep, "save"): lambda path, state: (path, state),
    (pickle, "dump"): lambda obj, file, *_, **__: (file, obj),
    (np, "save"): lambda file, arr, *_, **__: (file, arr),
    (np, "savez"): lambda file, *args, **named: (file, _named(args, named)),
    (np, "savez_compressed"): lambda file, *args, **named: (file, _named(args, named)),
}


class Outputs:
    """Writes a record of each printed line and each saved file."""

    def __init__(
        self,
        write: Callable[[dict[str, Any]], None],
        where: Callable[[], tuple[int, bool]],
        trained: Callable[[], set[int]],
    ) -> None:
        """`where` returns the number of steps taken, and whether the script is inside a training loop; `trained` the
        addresses of the models' tensors, which are compared at each step."""
        self._write, self._where, self._trained = write, where, trained
        self._count = 0
        self._is_saving = False

    def begin(self) -> None:
        self._listen(sys.stdout)
        self._listen(sys.stderr)
        wrap(builtins, "open", self._open, io)
        for (owner, name), read in _SAVING.items():
            wrap(owner, name, partial(self._save, read))

    def _note(self, verb: str, text: str, at: str, *, inside: bool | None = None) -> None:
        self._count += 1
        if self._count <= _MOST_LINES:
            inside = self._where()[1] if inside is None else inside
            self._write({"verb": verb, "text": text[:_MOST_LETTERS], "at": at, "inside": inside})

    def _open(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        file = original(*args, **kwargs)
        if not (isinstance(file, io.TextIOWrapper) and file.writable() and users_line()):
            return file
        lines = _Lines(self._note, "writes", f"{Path(str(file.name)).name}: ")
        return _Listened(file, _OPEN.bind(*args, **kwargs).arguments.get("newline"), lines)

    def _listen(self, stream: TextIO) -> None:
        lines = _Lines(self._note, "prints")

        def write(original: Callable[[str], int], text: str) -> int:
            lines.add(text)
            return original(text)

        wrap(stream, "write", write)

    def _save(
        self,
        read: Callable[..., tuple[Any, Any]],
        original: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        path, state = None, None
        with suppress(TypeError):  # the original says which argument is wrong
            path, state = read(*args, **kwargs)
        path = getattr(path, "name", path)  # of an open file
        if isinstance(path, str | os.PathLike) and not self._is_saving and users_line():
            name, line = Path(path).name, users_line()
            self._note("saves", f"{name} after step {self._where()[0]}", line)
            for text in islice(numbers_in(state, self._trained()), _MOST_NUMBERS):
                self._note("writes", f"{name}: {text}", line, inside=False)
        before, self._is_saving = self._is_saving, True
        try:
            return original(*args, **kwargs)
        finally:
            self._is_saving = before


def _named(arrays: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays by the names that they have in a file of savez."""
    return {f"arr_{at}": array for at, array in enumerate(arrays)} | dict(named)


class _Lines:
    """Notes the lines of a text that comes in pieces, each with the script's line that began it."""

    def __init__(self, note: Callable[[str, str, str], None], verb: str, into: str = "") -> None:
        self._note, self._verb, self._into = note, verb, into
        self._begun = self._at = ""

    def add(self, text: str) -> None:
        self._at = self._at if self._begun else users_line()
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            if "\r" not in line.rstrip("\r") and not line.startswith("samestep:"):
                self._note(self._verb, self._into + line, self._at)
        self._at = users_line() if lines else self._at

    def end(self) -> None:
        if self._begun:
            self._note(self._verb, self._into + self._begun, self._at)
            self._begun = ""


class _Listened(io.TextIOWrapper):
    """A file that the script writes. It may leave it to Python to close, so nothing else may keep it."""

    def __init__(self, file: io.TextIOWrapper, newline: str | None, lines: _Lines) -> None:
        encoding, errors, line_buffering = file.encoding, file.errors, file.line_buffering
        vars(self)["mode"], self._lines = file.mode, lines
        super().__init__(file.detach(), encoding, errors, newline, line_buffering)

    def write(self, text: str) -> int:
        self._lines.add(text)
        return super().write(text)

    def close(self) -> None:
        self._lines.end()
        super().close()
