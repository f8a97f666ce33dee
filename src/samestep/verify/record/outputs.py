"""Records what a script prints, writes to text files and saves, with its line and the place in the training."""

import builtins
import io
import os
import sys
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch

import samestep
from samestep.train.group.control import users_line
from samestep.verify.record import wrap

_MOST_LINES = 10_000
_MOST_LETTERS = 500


class Outputs:
    """Writes a record of each printed line and each saved file."""

    def __init__(
        self, write: Callable[[dict[str, Any]], None], where: Callable[[], tuple[int, bool]]
    ) -> None:
        """`where` returns the number of steps taken, and whether the script is inside a training loop."""
        self._write, self._where = write, where
        self._count = 0
        self._is_saving = False

    def begin(self) -> None:
        self._listen(sys.stdout, "prints")
        self._listen(sys.stderr, "prints")
        wrap(builtins, "open", self._open, io)
        wrap(torch, "save", partial(self._save, 1))
        wrap(samestep, "save", partial(self._save, 0))

    def _note(self, verb: str, text: str, at: str) -> None:
        self._count += 1
        if self._count <= _MOST_LINES:
            self._write({"verb": verb, "text": text[:_MOST_LETTERS], "at": at, "inside": self._where()[1]})

    def _open(
        self, original: Callable[..., Any], path: Any, mode: str = "r", *args: Any, **kwargs: Any
    ) -> Any:
        file = original(path, mode, *args, **kwargs)
        if isinstance(file, io.TextIOWrapper) and file.writable() and users_line():
            self._listen(file, "writes", f"{Path(str(path)).name}: ")
        return file

    def _listen(self, stream: TextIO, verb: str, into: str = "") -> None:
        begun = at = ""
        # a file that the script leaves to Python to close, as in json.dump(losses, open("losses.json", "w")), must not
        # be kept open by its own methods
        this: Callable[[], Any] = weakref.ref(stream)
        kind: Any = type(stream)

        def write(text: str) -> int:
            nonlocal begun, at
            at = at if begun else users_line()
            *lines, begun = (begun + text).split("\n")
            for line in lines:
                if "\r" not in line.rstrip("\r") and not line.startswith("samestep:"):
                    self._note(verb, into + line, at)
            at = users_line() if lines else at
            return int(kind.write(this(), text))

        def close() -> None:
            if begun and not this().closed:
                self._note(verb, into + begun, at)
            kind.close(this())

        vars(stream).update(write=write, close=close)

    def _save(self, place: int, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        path = args[place] if len(args) > place else kwargs.get("f", kwargs.get("path"))
        if isinstance(path, str | os.PathLike) and not self._is_saving:
            self._note("saves", f"{Path(path).name} after step {self._where()[0]}", users_line())
        before, self._is_saving = self._is_saving, True
        try:
            return original(*args, **kwargs)
        finally:
            self._is_saving = before
