"""Notes which lines read the rank, the number of ranks or the time, and can change the answers in an experiment."""

import os
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import fields
from datetime import timedelta
from functools import partial
from itertools import count, product
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

import samestep
from samestep.train.group import world
from samestep.verify.record import wrap
from samestep.verify.record.remove import Removed

_ALONE = {"rank": 0, "size": 1, "local_rank": 0, "local_size": 1, "node": 0, "nodes": 1}
_VARIABLES = {
    **dict.fromkeys(("RANK", "LOCAL_RANK", "SLURM_PROCID", "SLURM_LOCALID"), "0"),
    **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_NTASKS"), "1"),
}
_CLOCKS = ("time", "perf_counter", "monotonic", "process_time")
_TICKS = {"": 0.01, "_ns": 10_000_000}
_TORCH = str(Path(torch.__file__).parent)
# Files whose calls count as calls of their caller, and files whose calls are ignored.
_ON_BEHALF = ("<", os.__file__, str(Path(__file__).parent), f"{_TORCH}/utils/data/distributed.py")
_FOR_ITSELF = (str(Path(world.__file__).parents[2]), _TORCH, str(Path(psutil.__file__).parent))
_PYTHONS = sysconfig.get_path("stdlib")


class Reads:
    """The lines that read the rank or size, each with what it reads."""

    def __init__(self, removed: Removed, timeout_s: float | None) -> None:
        """The timeout is init's, for ranks that have lost each other."""
        self._removed, self._timeout_s = removed, timeout_s
        self.lines: dict[str, list[str]] = {}
        self.clock: list[str] = []
        self.seeded: list[int] = []
        self._ticks = count(1)

    def begin(self) -> None:
        """Replace the functions and variables that tell the rank, the size and the time."""
        watcher = self

        class Watched(world.World):
            def __getattribute__(self, name: str) -> Any:
                value = super().__getattribute__(name)
                return watcher._answer(f"world.{name}", value, _ALONE[name]) if name in _ALONE else value

        def init(original: Callable[..., world.World], **options: Any) -> world.World:
            if self._timeout_s is not None:
                options["timeout"] = timedelta(seconds=self._timeout_s)
            joined = original(**options)
            return Watched(*(getattr(joined, field.name) for field in fields(joined)))

        class Environment(os._Environ):  # type: ignore[type-arg]
            def __getitem__(self, key: str) -> Any:
                value = super().__getitem__(key)
                return watcher._answer(key, value, _VARIABLES[key]) if key in _VARIABLES else value

        wrap(world, "init", init, samestep)
        os.environ.__class__ = Environment
        wrap(dist, "get_rank", lambda ask, *group: self._answer("get_rank()", ask(*group), 0))
        wrap(dist, "get_world_size", lambda ask, *group: self._answer("get_world_size()", ask(*group), 1))
        for name, (suffix, tick) in product(_CLOCKS, _TICKS.items()):
            wrap(time, f"{name}{suffix}", partial(self._time, tick))
        wrap(os, "getpid", partial(self._time, 1))
        wrap(torch, "manual_seed", self._manual_seed, torch.random)
        if self._removed.values("world"):
            wrap(torch, "save", _save_on_rank_0)

    def _answer(self, what: str, value: Any, alone: Any) -> Any:
        if (line := _asking()) is None:
            return value
        reads = self.lines.setdefault(line, [])
        if what not in reads:
            reads.append(what)
        return alone if {"*", line} & {*self._removed.values("world")} else value

    def _manual_seed(self, seed: Callable[[Any], Any], value: Any) -> Any:
        if _asking() is not None:
            self.seeded.append(int(value))
        return seed(value)

    def _time(self, tick: float, ask: Callable[[], float]) -> float:
        if (line := _asking()) is None:
            return ask()
        if line not in self.clock:
            self.clock.append(line)
        return next(self._ticks) * tick if "clock" in self._removed else ask()


def _asking() -> str | None:
    """The line of the script that asks; None if a library asks for itself."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_code.co_filename.startswith(_ON_BEHALF):
        frame = frame.f_back
    file = frame.f_code.co_filename
    is_pythons = file.startswith(_PYTHONS) and "-packages" not in file
    is_for_itself = is_pythons or file.startswith(_FOR_ITSELF)
    return None if is_for_itself else f"{Path(file).name}:{frame.f_lineno}"


def _save_on_rank_0(original: Callable[..., None], obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
    """Let only the real rank 0 save: in this experiment every rank believes to be rank 0."""
    is_alone = not dist.is_initialized() or dist.distributed_c10d.get_rank() == 0
    if is_alone or not isinstance(f, str | os.PathLike):
        original(obj, f, *args, **kwargs)
