"""Starts ranks quickly from warm processes, which have imported torch: forked, or as spares if forking is not safe.

Covered: warm processes that are not ready, have ended or were killed; then Python starts the ranks as usual.
"""

import ctypes
import json
import os
import select
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from io import FileIO
from math import inf
from pathlib import Path
from subprocess import DEVNULL, Popen

from samestep.files import unnamed_file
from samestep.start.python import scripts_python
from samestep.start.worker import Guardian, Started, WorkerSpec, start_process

_FILE = Path(__file__).with_name("warm.py")
_CHILD_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
_FORKS = b"forks"  # the message of a ready process that may be forked
_READY_S = 120.0  # for a warm process to import torch
_TEND_S = 0.5  # between two checks of the warm processes
_ANSWER_S = 5.0  # for a warm process to start a rank


class Warm:
    """The warm processes of a launcher: a single process to fork, or spare processes that become ranks."""

    def __init__(
        self, path: Sequence[str], env: Mapping[str, str], size: int, errors: Path, guardian: Guardian
    ) -> None:
        """`path` is where the scripts search modules first; stderr of the warm processes goes to the file `errors`."""
        self._new = partial(_Warm, path, env, errors, guardian)
        self._size, self._all, self._tend_at = size, list[_Warm](), 0.0

    def tend(self, now: float) -> None:
        """Keep a warm process running, or one per rank if they cannot be forked."""
        if now < self._tend_at:
            return
        self._tend_at = now + _TEND_S
        for warm in list(self._all):
            if (status := warm.process.poll()) is not None:
                self._all.remove(warm)
                warm.close()
                if status > 0:  # it cannot import torch, and never will
                    self._tend_at = inf
                    return
        spares = self._size if any(warm.is_ready() and not warm.forks for warm in self._all) else 1
        with suppress(OSError):  # as on a full disk: then Python starts the ranks
            while len(self._all) < spares:
                self._all.append(self._new())

    def wait(self, *signals: int) -> None:
        """Wait until a warm process is ready, a signal has arrived, or the time is over."""
        self.tend(time.monotonic())
        if self._all:
            select.select([self._all[0].orders.fileno(), *signals], [], [], _READY_S)

    def start(self, spec: WorkerSpec) -> Started:
        """Start a rank from a warm process; if none answers, as a new Python process."""
        for warm in [warm for warm in self._all if warm.is_ready()]:
            rank = warm.start(spec)
            if rank is None or not warm.forks:
                self._all.remove(warm)
            if rank is not None:
                return rank
            warm.close()
        return start_process(spec)

    def close(self) -> None:
        while self._all:
            self._all.pop().close()


class _Warm:
    """A single warm process."""

    def __init__(self, path: Sequence[str], env: Mapping[str, str], errors: Path, guardian: Guardian) -> None:
        self.orders, their_end = socket.socketpair()
        self._guardian = guardian
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        with their_end, open(os.open(errors, flags, 0o600), "ab") as file:
            self.process = Popen(
                [scripts_python(), str(_FILE), *path],
                bufsize=0,
                env=env,
                stdin=their_end.fileno(),
                stdout=DEVNULL,
                stderr=file,
                start_new_session=True,
            )
        guardian.watch(self.process.pid)
        self.forks: bool | None = None  # not known before it is ready

    def is_ready(self) -> bool:
        if self.forks is None and (answer := self._answer(0.0)):
            self.forks = answer == _FORKS
        return self.forks is not None

    def start(self, spec: WorkerSpec) -> Started | None:
        """Start a rank; None if the warm process does not answer."""
        descriptors = spec.descriptors
        order: dict[str, object] = {"command": spec.command, "env": spec.env, "cores": spec.cores}
        order |= {"named": list(descriptors), "launcher": os.getpid(), "fork": self.forks}
        (out, out_end), (err, err_end) = os.pipe(), os.pipe()
        with open(os.devnull, "rb") as devnull, unnamed_file(json.dumps(order).encode()) as file:
            stdin = devnull.fileno() if spec.stdin is None else spec.stdin
            try:
                pid = self._ask([file.fileno(), stdin, out_end, err_end, *descriptors.values()])
            except (OSError, ValueError):
                os.close(out)
                os.close(err)
                return None
            finally:
                os.close(out_end)
                os.close(err_end)
        poll = partial(_reap, pid) if self.forks else self.process.poll
        return Started(pid, FileIO(out), FileIO(err), poll)

    def _ask(self, descriptors: Sequence[int]) -> int:
        """Send an order; returns the pid of the new rank, which the kernel makes a child of this process."""
        _adopt(True)
        try:
            socket.send_fds(self.orders, [b"!"], descriptors)
            return int(self._answer(_ANSWER_S))
        finally:
            _adopt(False)

    def _answer(self, wait_s: float) -> bytes:
        """The next message, which it sends at once; b"" if it has ended."""
        with suppress(OSError):
            if select.select([self.orders], [], [], wait_s)[0]:
                return self.orders.recv(64)
        return b""

    def close(self) -> None:
        self.orders.close()
        with suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        self._guardian.watch(self.process.pid, "-")


def _reap(pid: int) -> int | None:
    """The status of a forked rank; None if it still runs."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def _adopt(is_on: bool) -> None:
    """Set whether orphaned descendants become children of this process."""
    if sys.platform == "linux" and ctypes.CDLL(None).prctl(_CHILD_SUBREAPER, int(is_on), 0, 0, 0):
        raise OSError("the kernel refuses to give this process the children of another")
