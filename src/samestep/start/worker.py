"""One worker process: started with its own cores and pipes, and ended with everything it started."""

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import NamedTuple

from samestep.failure import read_failure
from samestep.rundir import CHECKPOINTED
from samestep.start.failure import Traceback, of_record, read_traceback
from samestep.start.output import ERR, OUT, Console, Log, Stream

_GUARDIAN = Path(__file__).with_name("guardian.py")
# Python ignores these two, and what is ignored stays so in the programs it starts.
_RESTORED = [signal.SIGPIPE, signal.SIGXFSZ]


class WorkerSpec(NamedTuple):
    """What to start for one rank, and where its output goes."""

    rank: int
    command: Sequence[str]
    env: Mapping[str, str]
    cores: Sequence[int] | None
    stdin: int | None
    log: Log | None = None
    console: Console | None = None
    prefix: bytes | None = None
    record: Path | None = None


class Guardian:
    """The process that ends the workers should this one be killed."""

    def __init__(self) -> None:
        end, self._pipe = os.pipe()
        try:
            self._pid = os.posix_spawn(
                sys.executable,
                [sys.executable, "-I", "-S", str(_GUARDIAN)],
                os.environ,
                file_actions=[(os.POSIX_SPAWN_DUP2, end, 0)]
                + [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_WRONLY, 0) for fd in (OUT, ERR)],
                setsid=True,
            )
        finally:
            os.close(end)

    def watch(self, group: int, sign: str = "+") -> None:
        """End this process group with this process; with the sign `-`, which is for a group that is gone, not."""
        with suppress(BrokenPipeError):
            os.write(self._pipe, f"{sign}{group}\n".encode())

    def __enter__(self) -> "Guardian":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._pipe)
        os.waitpid(self._pid, 0)


class Worker:
    """A started rank."""

    def __init__(self, spec: WorkerSpec, guardian: Guardian) -> None:
        """Raises OSError where the command cannot be executed."""
        self.rank, self._record, self._guardian = spec.rank, spec.record, guardian
        self.status: int | None = None
        self.ended_at, self.was_stopped = inf, False
        out, out_end = os.pipe()
        err, err_end = os.pipe()
        self.out = Stream(out, OUT, spec.log, spec.console, spec.prefix)
        self.err = Stream(err, ERR, spec.log, spec.console, spec.prefix)
        try:
            self.pid = _spawn(spec, out_end, err_end)
        except OSError:
            self.out.finish()
            self.err.finish()
            raise
        finally:
            os.close(out_end)
            os.close(err_end)
        guardian.watch(self.pid)
        self.pidfd = os.pidfd_open(self.pid) if hasattr(os, "pidfd_open") else None

    @property
    def is_alive(self) -> bool:
        """Whether it has not been seen to end."""
        return self.status is None

    @property
    def failed_at(self) -> float:
        """When its traceback began, or it ended without one."""
        return min(self.ended_at, self.err.traceback_at)

    def traceback(self) -> Traceback | None:
        """The exception that ended it, by its own record or else by what it printed."""
        failure = read_failure(self._record, self.pid) if self._record else None
        # After its record it may have gone on, or crashed: then what it printed last tells more.
        if failure and (self.was_stopped or self.status == failure.code):
            return of_record(failure)
        return read_traceback(self.err.tail.decode(errors="replace"))

    def send(self, number: int) -> None:
        """A signal for the worker alone: what it started is its own business."""
        if self.is_alive:
            os.kill(self.pid, number)

    def send_group(self, number: int) -> None:
        """A signal for the worker and everything it started."""
        if not self.is_alive:
            return
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            os.kill(self.pid, number)

    def look(self) -> bool:
        """Whether it has ended; then what it started is ended too, and its last output read."""
        if self.status is not None:
            return True
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if not pid:
            return False
        self.status, self.ended_at = os.waitstatus_to_exitcode(status), time.monotonic()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._guardian.watch(self.pid, "-")
        if self.pidfd is not None:
            os.close(self.pidfd)
        for stream in (self.out, self.err):
            stream.drain()
            if self.status in (0, CHECKPOINTED):
                stream.release()
        return True


def fill_standard_descriptors() -> None:
    """Open /dev/null where a standard descriptor is closed: the next pipe would take its number."""
    for number in (0, OUT, ERR):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def _spawn(spec: WorkerSpec, out: int, err: int) -> int:
    actions: list[tuple[int, int, int] | tuple[int, int, str, int, int]] = []
    if spec.stdin is None:
        actions.append((os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0))
    elif spec.stdin != 0:
        actions.append((os.POSIX_SPAWN_DUP2, spec.stdin, 0))
    actions += [(os.POSIX_SPAWN_DUP2, out, OUT), (os.POSIX_SPAWN_DUP2, err, ERR)]
    before = os.sched_getaffinity(0) if spec.cores else None
    if spec.cores:
        # A process inherits its cores, so they are set here for a moment: no code runs between fork and exec.
        os.sched_setaffinity(0, spec.cores)
    try:
        return os.posix_spawnp(
            spec.command[0],
            list(spec.command),
            spec.env,
            file_actions=actions,
            setsid=True,
            setsigdef=_RESTORED,
        )
    finally:
        if before:
            os.sched_setaffinity(0, before)
