"""One worker process: started with its own cores and pipes, and ended together with its child processes."""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from io import FileIO
from math import inf
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from typing import Any, NamedTuple, cast

from samestep.failure import Failure, read_failure
from samestep.rundir import CHECKPOINTED
from samestep.start.output import ERR, OUT, Console, Log, Stream
from samestep.tracebacks import Traceback, read_traceback, recorded_traceback, with_assertion

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
_GUARDIAN = Path(__file__).with_name("guardian.py")


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
    descriptors: Mapping[str, int] = {}  # inherited descriptors, by the variable that holds the number
    is_alone: bool = True  # no other threads in this process: required for code between fork and exec


class Started(NamedTuple):
    pid: int
    stdout: Any
    stderr: Any
    poll: Callable[[], int | None]  # gives its status once it has ended


def start_process(spec: WorkerSpec) -> Started:
    """Start the command of a rank in a new process; raises OSError if it cannot be executed."""
    descriptors = spec.descriptors
    with bound(spec.cores):
        process = Popen(
            spec.command,
            bufsize=0,
            env={**spec.env, **{name: str(descriptor) for name, descriptor in descriptors.items()}},
            stdin=DEVNULL if spec.stdin is None else spec.stdin,
            stdout=PIPE,
            stderr=PIPE,
            start_new_session=True,
            pass_fds=tuple(descriptors.values()),
            preexec_fn=partial(end_with_parent, os.getpid()) if spec.is_alone else None,
        )
    return Started(process.pid, process.stdout, process.stderr, process.poll)


class Guardian(Popen[bytes]):
    """The process that kills the workers if this one is killed."""

    def __init__(self) -> None:
        command = [sys.executable, "-I", "-S", str(_GUARDIAN)]
        super().__init__(
            command, bufsize=0, stdin=PIPE, stdout=DEVNULL, stderr=DEVNULL, start_new_session=True
        )

    def watch(self, group: int, sign: str = "+") -> None:
        """Kill this process group when this process ends; sign `-`: the group has already ended."""
        with suppress(BrokenPipeError):
            cast(FileIO, self.stdin).write(f"{sign}{group}\n".encode())


class Worker:
    def __init__(
        self, spec: WorkerSpec, guardian: Guardian, start: Callable[[WorkerSpec], Started] = start_process
    ) -> None:
        """Raises OSError if the command cannot be executed."""
        self.rank, self._record, self._guardian = spec.rank, spec.record, guardian
        self.status: int | None = None
        self.ended_at, self.was_stopped = inf, False
        self._process = start(spec)
        self.pid = self._process.pid
        guardian.watch(self.pid)
        self.pidfd = os.pidfd_open(self.pid) if hasattr(os, "pidfd_open") else None
        self.out = Stream(self._process.stdout, OUT, spec.log, spec.console, spec.prefix)
        self.err = Stream(self._process.stderr, ERR, spec.log, spec.console, spec.prefix, self.out)

    @property
    def is_alive(self) -> bool:
        return self.status is None

    @property
    def failed_at(self) -> float:
        """When its traceback began; without a traceback, when it ended."""
        return min(self.ended_at, self.err.traceback_at)

    @property
    def failure(self) -> Failure | None:
        """The record in which the worker wrote why it failed."""
        return read_failure(self._record, self.pid) if self._record else None

    def traceback(self) -> Traceback | None:
        """The exception that ended it, from its record, or else from its stderr."""
        # After writing its record it may have continued or crashed: then its last output tells more.
        failure, stderr = self.failure, self.err.tail.decode(errors="replace")
        if failure and failure.exception and (self.was_stopped or self.status == failure.code):
            traceback: Traceback | None = recorded_traceback(failure)
        else:
            traceback = read_traceback(stderr)
        return traceback and with_assertion(traceback, stderr)

    @property
    def blamed(self) -> tuple[int, ...]:
        """The ranks that differ from the others, according to its exception."""
        return failure.ranks if (failure := self.failure) else ()

    @property
    def is_echo(self) -> bool:
        """Whether its exception only says that another rank has ended."""
        traceback = self.traceback()
        return traceback is not None and traceback.is_echo

    def send(self, number: int) -> None:
        """Send a signal to the worker alone, not to its child processes."""
        if self.is_alive:
            os.kill(self.pid, number)

    def send_group(self, number: int) -> None:
        """Send a signal to the worker and its child processes."""
        try:
            if self.is_alive:
                os.killpg(self.pid, number)
        except ProcessLookupError:
            os.kill(self.pid, number)

    def look(self) -> bool:
        """Whether it has ended; if so, kill its child processes and read its last output."""
        if self.status is not None:
            return True
        self.status = self._process.poll()
        if self.status is None:
            return False
        self.ended_at = time.monotonic()
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


def end_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent ends: the guardian may have been killed too."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)


def fill_standard_descriptors() -> None:
    """Open /dev/null for each standard descriptor that is closed: the next pipe would take its number."""
    for number in (0, OUT, ERR):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


@contextmanager
def bound(cores: Collection[int] | None) -> Iterator[None]:
    """While entered, this process is bound to these cores; a process started now inherits them."""
    before = os.sched_getaffinity(0) if cores else None
    if cores:
        os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        if before:
            os.sched_setaffinity(0, before)
