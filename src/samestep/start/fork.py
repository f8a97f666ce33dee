"""Starts ranks quickly: forks them from a warm process, which has imported torch.

Covered: a warm process that is not ready, cannot be forked safely, or has ended; then Python starts the ranks as usual.
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
_READY_S = 120.0  # for a warm process to import torch
_TEND_S = 0.5  # between two checks of the warm processes
_ANSWER_S = 5.0  # for a warm process to start a rank


class Warm:
    """The warm process of a launcher; there may be none."""

    def __init__(self, path: Sequence[str], env: Mapping[str, str], errors: Path, guardian: Guardian) -> None:
        """`path` is where the scripts search modules first; stderr of the warm process goes to the file `errors`."""
        self._command, self._env = [scripts_python(), str(_FILE), *path], env
        self._errors, self._guardian = errors, guardian
        self._process: Popen[bytes] | None = None
        self._is_ready = False
        self._tend_at = 0.0 if sys.platform == "linux" else inf  # elsewhere a fork is not safe

    def tend(self, now: float) -> None:
        """Keep a warm process running."""
        if now < self._tend_at:
            return
        self._tend_at = now + _TEND_S
        if self._process is not None and (status := self._process.poll()) is not None:
            self.close()
            if status > 0:  # it cannot import torch, or not be forked, and never will
                self._tend_at = inf
                return
        if self._process is None:
            with suppress(OSError):  # as on a full disk: then Python starts the ranks
                self._begin()

    def wait(self, *signals: int) -> None:
        """Wait until the warm process is ready, a signal has arrived, or the time is over."""
        self.tend(time.monotonic())
        if self._process is not None:
            select.select([self._orders.fileno(), *signals], [], [], _READY_S)

    def start(self, spec: WorkerSpec) -> Started:
        """Start a rank from the warm process; if it does not answer, as a new Python process."""
        if self._process is not None:
            self._is_ready = self._is_ready or bool(self._answer(0.0))
            if self._is_ready and (rank := self._fork(spec)):
                return rank
            if self._is_ready:
                self.close()
        return start_process(spec)

    def close(self) -> None:
        process, self._process, self._is_ready = self._process, None, False
        if process is None:
            return
        self._orders.close()
        with suppress(ProcessLookupError):
            process.kill()
        process.wait()
        self._guardian.watch(process.pid, "-")

    def _begin(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        with open(os.open(self._errors, flags, 0o600), "ab") as file:
            self._orders, their_end = socket.socketpair()
            with their_end:
                self._process = Popen(
                    self._command,
                    bufsize=0,
                    env=self._env,
                    stdin=their_end.fileno(),
                    stdout=DEVNULL,
                    stderr=file,
                    start_new_session=True,
                )
        self._guardian.watch(self._process.pid)

    def _fork(self, spec: WorkerSpec) -> Started | None:
        """Start a rank; None if the warm process does not answer."""
        descriptors = spec.descriptors
        order: dict[str, object] = {"command": spec.command, "env": spec.env, "cores": spec.cores}
        order |= {"named": list(descriptors), "launcher": os.getpid()}
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
        return Started(pid, FileIO(out), FileIO(err), partial(_reap, pid))

    def _ask(self, descriptors: Sequence[int]) -> int:
        """Send an order; returns the pid of the new rank, which the kernel makes a child of this process."""
        _adopt(True)
        try:
            socket.send_fds(self._orders, [b"!"], descriptors)
            return int(self._answer(_ANSWER_S))
        finally:
            _adopt(False)

    def _answer(self, wait_s: float) -> bytes:
        """The next message, which it sends at once; b"" if it has ended."""
        with suppress(OSError):
            if select.select([self._orders], [], [], wait_s)[0]:
                return self._orders.recv(64)
        return b""


def _reap(pid: int) -> int | None:
    """The status of a forked rank; None if it still runs."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def _adopt(is_on: bool) -> None:
    """Set whether orphaned descendants become children of this process."""
    if ctypes.CDLL(None).prctl(_CHILD_SUBREAPER, int(is_on), 0, 0, 0):
        raise OSError("the kernel refuses to give this process the children of another")
