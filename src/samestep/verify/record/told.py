"""Notes where a script asks for its rank or the number of ranks, and tells it 0 and 1 at the lines to be removed."""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

import samestep
from samestep.train.group import world

_ALONE = {"rank": 0, "size": 1, "local_rank": 0, "local_size": 1, "node": 0, "nodes": 1}
_VARIABLES = {
    **dict.fromkeys(("RANK", "LOCAL_RANK", "SLURM_PROCID", "SLURM_LOCALID"), "0"),
    **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_NTASKS"), "1"),
}
_LIBRARIES = (str(Path(world.__file__).parents[2]), str(Path(torch.__file__).parent), "<frozen", os.__file__)
_ASKS_FOR_THE_SCRIPT = str(Path(torch.__file__).parent / "utils" / "data" / "distributed.py")


class Told:
    """The lines that ask, each with what it asks for; `alone` are those that get the answer of a single process."""

    def __init__(self, alone: Sequence[str], timeout_s: float | None) -> None:
        """`*` stands for every line; ranks that wait longer than the timeout for each other have lost each other."""
        self._timeout_s = timeout_s
        self.lines: dict[str, list[str]] = {}
        self._alone = set(alone)

    @property
    def is_everywhere(self) -> bool:
        return "*" in self._alone

    def begin(self) -> None:
        """Note from here on."""
        told = self

        class Watched(world.World):
            def __getattribute__(self, name: str) -> Any:
                value = super().__getattribute__(name)
                return told.answer(f"world.{name}", value, _ALONE[name]) if name in _ALONE else value

        init = world.init

        def watched_init(**options: Any) -> world.World:
            if self._timeout_s is not None:
                options["timeout"] = timedelta(seconds=self._timeout_s)
            joined = init(**options)
            return Watched(*(getattr(joined, field.name) for field in fields(joined)))

        class Environment(os._Environ):  # type: ignore[type-arg]
            def __getitem__(self, key: str) -> Any:
                value = super().__getitem__(key)
                return told.answer(key, value, _VARIABLES[key]) if _is_asked(key) else value

        world.init = samestep.init = watched_init
        os.environ.__class__ = Environment
        dist.get_rank = self._watched(dist.get_rank, 0)
        dist.get_world_size = self._watched(dist.get_world_size, 1)
        if self._alone:
            _save_on_rank_0()

    def answer(self, what: str, value: Any, alone: Any) -> Any:
        line = _line(sys._getframe(2))
        asked = self.lines.setdefault(line, [])
        if what not in asked:
            asked.append(what)
        return alone if self.is_everywhere or line in self._alone else value

    def _watched(self, original: Callable[..., int], alone: int) -> Callable[..., int]:
        def ask(*args: Any, **kwargs: Any) -> int:
            value = original(*args, **kwargs)
            caller = sys._getframe(1).f_code.co_filename
            if caller.startswith(_LIBRARIES) and caller != _ASKS_FOR_THE_SCRIPT:
                return value
            return int(self.answer(f"{original.__name__}()", value, alone))

        return ask


def _is_asked(key: Any) -> bool:
    """Whether the script itself, and no library, reads this variable."""
    if key not in _VARIABLES:
        return False
    frame = sys._getframe(2)
    while frame.f_back and frame.f_code.co_filename.startswith(("<frozen", os.__file__)):
        frame = frame.f_back
    return not frame.f_code.co_filename.startswith(_LIBRARIES)


def _line(frame: FrameType) -> str:
    """The nearest line of the script, also where a library asks for it."""
    while frame.f_back and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _save_on_rank_0() -> None:
    """Where every rank takes itself for rank 0, one of them writes the files."""
    original = torch.save

    def save(state: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        if (
            not dist.is_initialized()
            or dist.distributed_c10d.get_rank() == 0
            or not isinstance(path, str | Path)
        ):
            original(state, path, *args, **kwargs)

    torch.save = save  # type: ignore[assignment]
