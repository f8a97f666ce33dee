"""Records what a script prints, writes into text files and saves, each with its line and the place in the training."""

import builtins
import io
import json
import os
import sys
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


class Said:
    """Writes a record of each printed line and each saved file."""

    def __init__(self, write: Callable[[dict[str, Any]], None], where: Callable[[], dict[str, Any]]) -> None:
        """`where` says where in the training the script is."""
        self._write, self._where = write, where
        self._count = 0
        self._is_saving = False

    def begin(self) -> None:
        self._listen(sys.stdout)
        self._listen(sys.stderr)
        wrap(builtins, "open", self._open, io)
        wrap(torch, "save", partial(self._save, 1))
        wrap(samestep, "save", partial(self._save, 0))
        wrap(json, "dump", self._dump)

    def _note(self, text: str, line: str) -> None:
        self._count += 1
        if self._count <= _MOST_LINES:
            self._write({"said": text[:_MOST_LETTERS], "at": line, **self._where()})

    def _open(
        self, original: Callable[..., Any], path: Any, mode: str = "r", *args: Any, **kwargs: Any
    ) -> Any:
        file = original(path, mode, *args, **kwargs)
        if isinstance(file, io.TextIOWrapper) and file.writable() and users_line():
            self._listen(file, f"writes {Path(str(path)).name}: ")
        return file

    def _listen(self, stream: TextIO, what: str = "") -> None:
        begun = line = ""

        def write(original: Callable[[str], int], text: str) -> int:
            nonlocal begun, line
            line = line if begun else users_line()
            *lines, begun = (begun + text).split("\n")
            for said in lines:
                if said.strip() and "\r" not in said.rstrip("\r") and not said.startswith("samestep:"):
                    self._note(what + said, line)
            line = users_line() if lines else line
            return original(text)

        wrap(stream, "write", write)

    def _save(self, place: int, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        path = args[place] if len(args) > place else kwargs.get("f", kwargs.get("path"))
        if isinstance(path, str | os.PathLike) and not self._is_saving:
            self._note(f"saves {Path(path).name} after step {self._where()['step']}", users_line())
        before, self._is_saving = self._is_saving, True
        try:
            return original(*args, **kwargs)
        finally:
            self._is_saving = before

    def _dump(self, original: Callable[..., None], value: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        original(value, file, *args, **kwargs)
        if (line := users_line()) and isinstance(name := getattr(file, "name", None), str):
            self._note(f"writes {Path(name).name}: {value}", line)
