"""Watches N workers from their start to the end of the last one, and stops the rest when one fails."""

import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import NamedTuple

from samestep.hang import STUCK_S, Hang
from samestep.rundir import CHECKPOINTED
from samestep.start.fork import Warm
from samestep.start.output import Stream, Terminal
from samestep.start.watch import Watch
from samestep.start.worker import Guardian, Worker, WorkerSpec, started
from samestep.text import name_ranks
from samestep.tracebacks import Traceback

# How long a rank that only tells of another's end waits for that other to be seen.
_ECHO_S = 0.7
_HANG_S = 5.0
# What a rank that left the script takes to end, where the others did not come to the end with it.
_LEAVE_S = 8.0
GRACE_S = 1.0  # what the others have to end in after a failure
_PATIENCE_S = 30.0
_TICK_MS, _SOON_MS = 100, 10
_SETTLED_S = 20.0
# The interpreter says where it was when one of these ends it.
_TOLD = {-getattr(signal, f"SIG{name}") for name in ("SEGV", "ABRT", "BUS", "FPE", "ILL", "INT")}


class Outcome(NamedTuple):
    """How a group of workers ended."""

    status: int
    cause: Worker | None
    traceback: Traceback | None
    asked: int | None


class WorkerGroup:
    """The workers of one run, as one."""

    def __init__(
        self,
        specs: Sequence[WorkerSpec],
        guardian: Guardian,
        terminal: Terminal | None = None,
        patience_s: float | None = None,
        signals: int | None = None,
        is_over_elsewhere: Callable[[], bool] | None = None,
        watch: Watch | None = None,
        warm: Warm | None = None,
        grace_s: float = GRACE_S,
        asked: int | None = None,
    ) -> None:
        """Raises OSError where a worker cannot be started; `signals` is where arriving ones are read as bytes.

        `asked` is the signal that asked the run to end before these workers were started.
        """
        self.began = time.monotonic()
        self.workers: list[Worker] = []
        self._terminal, self._signals, self._is_over_elsewhere = terminal, signals, is_over_elsewhere
        self._watch, self._warm = watch, warm
        self._hang: Hang | None = None
        given = (grace_s, _PATIENCE_S, STUCK_S) if patience_s is None else [patience_s] * 3
        self._grace_s, self._patience_s, self._stuck_s = given
        self._asked = asked
        self.asked_late: int | None = None  # after a worker had failed
        self._asked_at = inf if asked is None else self.began
        self._stop_at, self._kill_at = self._asked_at + self._patience_s, inf
        self._stopping = self._was_killed = False
        try:
            for spec in specs:
                self.workers.append(Worker(spec, guardian, warm.start if warm else started))
        except OSError:
            self.kill()
            raise

    def watch(self) -> Outcome:
        """Wait for the last worker."""
        try:
            while self._alive() and not self._was_killed:
                self._turn()
            if self._watch:
                self._watch.tell_others(self.workers, time.monotonic())
        finally:
            self.kill()
        return self._outcome()

    def kill(self) -> None:
        """End every worker now."""
        if self._was_killed:
            return
        self._was_killed = True
        for worker in self._alive():
            worker.was_stopped = True
            worker.send_group(signal.SIGKILL)
        # A process in an uninterruptible read of a dead file system does not end; nobody can wait for that.
        until = time.monotonic() + _PATIENCE_S
        while self._alive() and time.monotonic() < until:
            for worker in self._alive():
                worker.look()
            time.sleep(0.001)
        if (left := [worker.rank for worker in self._alive()]) and self._terminal:
            self._terminal.say(
                f"samestep: SIGKILL did not end {name_ranks(left)}; the kernel holds what it does"
            )

    def _alive(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.is_alive]

    def _turn(self) -> None:
        alive = self._alive()
        both = (stream for worker in alive for stream in (worker.out, worker.err))
        streams = [stream for stream in both if not stream.pipe.closed]
        actions = self._actions(alive, streams)
        poll = select.poll()
        for fd, (event, _) in actions.items():
            poll.register(fd, event)
        for fd, _ in poll.poll(_SOON_MS if min(self._stop_at, self._kill_at) < inf else _TICK_MS):
            actions[fd][1]()
        now = time.monotonic()
        for stream in streams:
            stream.tick(now)
        if self._terminal:
            self._terminal.tick(now)
        self._settle(alive, now)
        if self._stopping:
            return
        if self._is_over_elsewhere and self._is_over_elsewhere():
            self._stop(now)
        elif self._watch:
            self._look(self._watch, now)

    def _look(self, watch: Watch, now: float) -> None:
        """Stop the workers where some wait in vain for too long, or after a request that none of them heeds."""
        # before the first step a warm process would take cores from the start of the ranks
        if self._warm and (watch.has_stepped or now - self.began > _SETTLED_S):
            self._warm.tend(now)
        is_over = watch.look(self.workers, now)
        if self._asked_at == inf and watch.is_asked_to_stop:
            self._asked_at = now
        is_late = now - self._asked_at >= self._stuck_s and watch.is_stuck
        if is_over or is_late:
            self._hang = watch.hang
            if is_late and self._asked is None:
                self._asked = signal.SIGTERM
            self._stopping = True
            self.kill()

    def _actions(
        self, alive: Sequence[Worker], streams: Sequence[Stream]
    ) -> dict[int, tuple[int, Callable[[], object]]]:
        """What to do when one of these descriptors can be read or written."""
        readers: dict[int, Callable[[], object]] = {
            stream.pipe.fileno(): stream.read
            for stream in streams
            if stream.console is None or not stream.console.crowded
        }
        readers |= {worker.pidfd: worker.look for worker in alive if worker.pidfd is not None}
        if (signals := self._signals) is not None:
            readers[signals] = lambda: self._hear(os.read(signals, 64))
        terminal = self._terminal
        writers = {kind: partial(terminal.write, kind) for kind in terminal.waiting()} if terminal else {}
        at_read = {fd: (select.POLLIN, read) for fd, read in readers.items()}
        return at_read | {fd: (select.POLLOUT, write) for fd, write in writers.items()}

    def _settle(self, watched: Sequence[Worker], now: float) -> None:
        """Stop the workers when one has failed, and kill them when their time to end is over."""
        failed = [worker for worker in watched if worker.look() and worker.status]
        for worker in () if self._stopping else failed:
            wait_s = 0.0
            if worker.status == -signal.SIGKILL and self._asked in (signal.SIGTERM, signal.SIGHUP):
                self._asked, self.asked_late = None, self._asked  # no script ends so because it was asked to
            if self._asked is not None or worker.status == CHECKPOINTED:
                wait_s = self._patience_s
            # its exception may name a rank that is about to raise the same
            elif worker.is_echo or any(other.rank in worker.blamed for other in self._alive()):
                wait_s = _LEAVE_S if any(map(self._way_out, self._alive())) else _ECHO_S
            self._stop_at = min(self._stop_at, now + wait_s)
        if now >= self._stop_at:
            self._stop_at = inf
            self._stop(now)
        if now >= self._kill_at:
            self.kill()

    def _stop(self, now: float) -> None:
        """Ask the workers that are left to end."""
        self._stopping = True
        self._kill_at = now + self._grace_s
        for worker in self.workers:
            if not worker.look():
                worker.was_stopped = True
                worker.send_group(signal.SIGTERM)
                worker.send_group(signal.SIGCONT)
            for stream in (worker.out, worker.err):
                stream.forget()

    def _hear(self, numbers: bytes) -> None:
        for number in numbers:
            if number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                self._asked_at = min(self._asked_at, time.monotonic())
            if number == signal.SIGINT:
                self._interrupt()
            else:
                self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        """To the workers; in a recovery, where it would end them before they commit, as a request to stop."""
        if number in (signal.SIGTERM, signal.SIGHUP):
            ended = [worker.status for worker in self.workers if worker.look() and not worker.was_stopped]
            if set(ended) - {0, CHECKPOINTED}:
                self.asked_late = number
            else:
                self._asked = number
                if self._watch and self._watch.is_recovering:
                    self._watch.ask_to_stop(number)
                    self._stop_at = time.monotonic() + self._patience_s
                    return
        for worker in self._alive():
            worker.send(number)

    def _interrupt(self) -> None:
        if self._asked == signal.SIGINT:
            self.kill()
            return
        self._asked = signal.SIGINT
        if self._terminal:
            self._terminal.say("stopping; press Ctrl-C again to stop at once")
        for worker in self._alive():
            worker.send(signal.SIGINT)
        self._stop_at = time.monotonic() + self._patience_s

    def _way_out(self, worker: Worker) -> str:
        return self._watch.way_out(worker) if self._watch else ""

    def _given_up(self, failed: Sequence[Worker]) -> Hang | None:
        """A hang by a rank of this node, where the ranks that waited gave up before this process did."""
        have_given_up = bool(failed) and all(worker.is_echo for worker in failed)
        hang = self._watch.hang if self._watch and have_given_up else None
        return hang if hang and hang.cause.rank in {worker.rank for worker in self.workers} else None

    def _outcome(self) -> Outcome:
        own = [worker for worker in self.workers if worker.status and not worker.was_stopped]
        self._hang = self._hang or self._given_up(own)
        if self._watch and self._hang:
            at = self._hang.cause.rank
            cause = next((worker for worker in self.workers if worker.rank == at), self.workers[0])
            status = 1 if self._asked is None else -self._asked
            hang = self._watch.failure(self._hang)
            told = cause.traceback() if cause.failure and not cause.is_echo else hang
            return Outcome(status, cause, told, self._asked)
        if not own:
            killed = any(worker.was_stopped for worker in self.workers)
            return Outcome(-signal.SIGKILL if killed else 0, None, None, self._asked)
        cause = min(own, key=_blame)
        left = next((worker for worker in self.workers if not worker.status and self._way_out(worker)), None)
        if left and cause.is_echo:
            code = " with exit code 0" if left.status == 0 else ""
            told = cause.traceback() or Traceback(None, ())  # where another waited, and for what
            code += f" while others waited for it{' in this line' if told.frame else ''}"
            why = f"rank {left.rank} {self._way_out(left)}{code}"
            said = [line for line in told.exception if "different calls" in line]
            return Outcome(1, left, Traceback(told.frame, (why, *said)), self._asked)
        if cause.is_echo:
            # A rank may print its traceback and then hang while it leaves: it is the cause all the same.
            since = cause.failed_at - _HANG_S
            hung = [worker for worker in self.workers if since < worker.err.traceback_at < cause.ended_at]
            cause = min([cause, *(worker for worker in hung if worker.was_stopped)], key=_blame)
        # all ranks raise that they differ, and the first of them may be one of the many that are alike
        cause = next((worker for worker in own if worker.rank in cause.blamed), cause)
        status = 1 if cause.was_stopped else cause.status or 0
        traceback = cause.traceback() if status > 0 or status in _TOLD else None
        was_asked = self._asked is not None and not _is_own_fault(status, traceback)
        if was_asked or status == CHECKPOINTED or self._asked == signal.SIGINT:
            return Outcome(min(own, key=lambda worker: worker.ended_at).status or 0, None, None, self._asked)
        return Outcome(status, cause, traceback, self._asked)


def _blame(worker: Worker) -> tuple[bool, float]:
    """The smallest is the cause: first of all who does not only tell of another, then who was first."""
    return worker.is_echo, worker.failed_at


def _is_own_fault(status: int, traceback: Traceback | None) -> bool:
    """Whether a worker that was asked to end failed on the way."""
    if status <= 0 or traceback is None or traceback.is_echo:
        return False
    return not traceback.exception[0].startswith("KeyboardInterrupt")
