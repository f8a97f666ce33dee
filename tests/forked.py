"""Ranks that are forked from a process which has torch already: real processes, without the seconds of a start.

`Nest().start(script, size, …)` runs a script on `size` ranks of a new world. As a program this file is the
process that forks them: an order is a line of JSON, an answer is one too.
"""

import atexit
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samestep.rendezvous.listen import hold_port

_POLL_S = 0.005


@dataclass
class Rank:
    """One process; `code` is as subprocess gives it, None while it lives."""

    rank: int
    pid: int
    log: Path
    errors: Path
    code: int | None = None
    ended_at: float = 0.0

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def complained(self) -> str:
        """What it wrote to stderr, where that is kept apart from stdout."""
        return self.errors.read_text(errors="replace")

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self.code is None:
            os.kill(self.pid, number)


class Nest:
    """Starts ranks and knows which of them live."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.living: dict[int, Rank] = {}
        self._count = 0
        self._held = socket.socket()
        clean = {name: value for name, value in os.environ.items() if not name.startswith("SAMESTEP")}
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**clean, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        os.set_blocking(self._process.stdout.fileno(), False)
        self._answers = b""

    def __enter__(self) -> "Nest":
        return self

    def __exit__(self, *_: object) -> None:
        for rank in list(self.living.values()):
            end_group(rank)
        self._held.close()
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()

    def start(
        self,
        script: Path,
        size: int,
        *argv: object,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        apart: bool = False,
    ) -> list[Rank]:
        """The script on ranks 0 to size - 1, or for size 0 on a process that belongs to no world.

        With apart, stdout and stderr go to files of their own.
        """
        self._held.close()
        self._held, port = hold_port()
        world = {
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        ranks = []
        for rank in range(max(size, 1)):
            self._count += 1
            log = self.home / f"said-{self._count}"
            errors = self.home / f"complained-{self._count}" if apart else log
            for file in (log, errors):
                file.touch()  # it may be read before the rank has opened it
            here = {**world, "RANK": rank, "LOCAL_RANK": rank} if size else {}
            variables = {**here, **(env or {})}
            order = {
                "argv": [str(script), *map(str, argv)],
                "env": {name: str(value) for name, value in variables.items()},
                "cwd": str(cwd or Path.cwd()),
                "log": str(log),
                "errors": str(errors),
            }
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
            ranks.append(Rank(rank, self._forked(), log, errors))
            self.living[ranks[-1].pid] = ranks[-1]
        return ranks

    def wait(self, ranks: Sequence[Rank], seconds: float = 50) -> list[int | None]:
        """Their exit codes; None for one that did not end in time."""
        until = time.monotonic() + seconds
        while any(rank.code is None for rank in ranks) and time.monotonic() < until:
            self._read(_POLL_S * 4)
        return [rank.code for rank in ranks]

    def look(self, seconds: float = 0.0) -> None:
        """Hear who has ended."""
        self._read(seconds)

    def _forked(self) -> int:
        while True:
            for answer in self._read(10):
                if "forked" in answer:
                    return int(answer["forked"])

    def _read(self, seconds: float) -> list[dict[str, Any]]:
        if select.select([self._process.stdout], [], [], seconds)[0]:
            data = os.read(self._process.stdout.fileno(), 1 << 16)
            if not data:
                raise AssertionError("the process that forks ranks has ended")
            self._answers += data
        *lines, self._answers = self._answers.split(b"\n")
        answers = [json.loads(line) for line in lines]
        for answer in answers:
            if rank := self.living.pop(answer.get("ended", -1), None):
                rank.code, rank.ended_at = answer["code"], time.monotonic()
        return answers


def end_group(rank: Rank) -> None:
    """Kill a rank with the loader workers it forked, also where it has ended itself."""
    for kill in (os.killpg, os.kill):  # a rank that was forked just now has no group of its own yet
        if rank.code is None or kill is os.killpg:
            with suppress(ProcessLookupError):
                kill(rank.pid, signal.SIGKILL)


def _load_torch() -> None:
    """What every rank imports, also what torch imports late."""
    import torch
    import torch._dynamo
    import torch.distributed
    import torch.nn.parallel
    import torch.utils.data

    import samestep

    torch.set_num_threads(1)
    for name in samestep.__all__:
        getattr(samestep, name)
    # what is here now is nobody's garbage, and collecting it would copy every page of it in every rank
    gc.collect()
    gc.freeze()


def _nest() -> dict[str, Any]:
    """Fork a process for each order; returns in the forked one, with the order."""
    living: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([0, *living], [], [])
        for fd in [fd for fd in ready if fd]:
            _, status = os.waitpid(living[fd], 0)
            _answer({"ended": living.pop(fd), "code": os.waitstatus_to_exitcode(status)})
            os.close(fd)
        if 0 in ready:
            line = b""
            while not line.endswith(b"\n"):
                if not (byte := os.read(0, 1)):
                    for pid in living.values():
                        os.killpg(pid, signal.SIGKILL)
                    sys.exit()
                line += byte
            pid = os.fork()
            if pid == 0:
                for fd in living:
                    os.close(fd)
                order: dict[str, Any] = json.loads(line)
                return order
            living[os.pidfd_open(pid)] = pid
            _answer({"forked": pid})


def _draw_anew() -> None:
    """Random streams that no other process has, as in one that was not forked."""
    import numpy as np
    import torch

    torch.seed()
    np.random.seed(None)


def _answer(answer: dict[str, Any]) -> None:
    os.write(1, json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    _load_torch()
    asked = _nest()
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    log, errors = (
        os.open(asked[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600) for name in ("log", "errors")
    )
    for fd, number in ((null, 0), (log, 1), (errors, 2)):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.update(asked["env"])
    os.chdir(asked["cwd"])
    sys.argv = asked["argv"]
    sys.path[0] = os.path.dirname(sys.argv[0])
    if asked["env"].get("FRESH_STREAMS"):
        _draw_anew()
    if action := asked["env"].get("PYTHONWARNINGS"):
        warnings.simplefilter(action)
    code = 0
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
    # as an interpreter ends, but without taking torch's modules to pieces, which takes 2 s in a fork
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
