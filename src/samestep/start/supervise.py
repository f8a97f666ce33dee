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
from samestep.start.worker import Guardian, Worker, WorkerSpec, start_process
from samestep.text import name_ranks
from samestep.tracebacks import Traceback

# After an error that only reports another rank's end: how long to wait for that other end.
_ECHO_S = 0.7
_HANG_S = 5.0  # how far before such an error a rank may have printed its traceback and hung
# How long a rank that has left the script may take to exit while others still wait for it.
_LEAVE_S = 8.0
GRACE_S = 1.0  # between SIGTERM and SIGKILL for the other workers after a failure
_PATIENCE_S = 30.0  # for workers to end after a request
_TICK_MS, _SOON_MS = 100, 10  # the longest wait of a turn, usually and near a deadline
_SETTLED_S = 20.0  # after this the start is over, even without a step
_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
# Python prints a traceback before it ends by one of these signals.
_WITH_TRACEBACK = {-getattr(signal, f"SIG{name}") for name in ("SEGV", "ABRT", "BUS", "FPE", "ILL", "INT")}


class Outcome(NamedTuple):
    """How a group of workers ended."""

    status: int
    cause: Worker | None
    traceback: Traceback | None
    stop_signal: int | None


class WorkerGroup:
    """The workers of this node in one start of a run."""

    def __init__(
        self,
        specs: Sequence[WorkerSpec],
        guardian: Guardian,
        terminal: Terminal | None = None,
        patience_s: float | None = None,
        *,
        signals: int | None = None,
        is_over_elsewhere: Callable[[], bool] | None = None,
        watch: Watch | None = None,
        warm: Warm | None = None,
        grace_s: float = GRACE_S,
        stop_signal: int | None = None,
    ) -> None:
        """Raises OSError if a worker cannot be started."""
        # Signals arrive as bytes from the descriptor `signals`; `stop_signal` arrived before this start.
        self.began = time.monotonic()
        self.workers: list[Worker] = []
        self._terminal, self._signals, self._is_over_elsewhere = terminal, signals, is_over_elsewhere
        self._watch, self._warm = watch, warm
        self._hang: Hang | None = None
        limits = (grace_s, _PATIENCE_S, STUCK_S) if patience_s is None else [patience_s] * 3
        self._grace_s, self._patience_s, self._stuck_s = limits
        self._stop_signal = stop_signal
        self.late_stop_signal: int | None = None  # after a worker had failed
        self._requested_at = inf if stop_signal is None else self.began
        self._stop_at, self._kill_at = self._requested_at + self._patience_s, inf
        self._stopping = self._was_killed = False
        try:
            for spec in specs:
                self.workers.append(Worker(spec, guardian, warm.start if warm else start_process))
        except OSError:
            self.kill()
            raise

    def watch(self) -> Outcome:
        try:
            while self._alive() and not self._was_killed:
                self._poll_once()
            if self._watch:
                self._watch.tell_others(self.workers, time.monotonic())
        finally:
            self.kill()
        if self._watch:
            self._watch.end_daemons(self.workers, self._grace_s)
        return self._outcome()

    def kill(self) -> None:
        """Send SIGKILL to every worker and wait until all have ended."""
        if self._was_killed:
            return
        self._was_killed = True
        for worker in self._alive():
            worker.was_stopped = True
            worker.send_group(signal.SIGKILL)
        # SIGKILL does not end a process in an uninterruptible read of a dead file system, so this wait has a limit.
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

    def _is_alive(self, ranks: Sequence[int]) -> bool:
        return any(worker.rank in ranks for worker in self._alive())

    def _poll_once(self) -> None:
        """Wait shortly for output, signals and ends; then check for failures, hangs and deadlines."""
        alive = self._alive()
        all_streams = (stream for worker in alive for stream in (worker.out, worker.err))
        streams = [stream for stream in all_streams if not stream.pipe.closed]
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
            self._check_for_hang(self._watch, now)

    def _check_for_hang(self, watch: Watch, now: float) -> None:
        """Kill the workers if a hang has lasted too long, or if no worker reacts to a request to stop."""
        # before the first step, starting a warm process would take cores from the ranks
        if self._warm and (watch.has_stepped or now - self.began > _SETTLED_S):
            self._warm.tend(now)
        if self._requested_at == inf and watch.is_asked_to_stop:
            self._requested_at = now
        is_late = now - self._requested_at >= self._stuck_s
        if watch.look(self.workers, now, is_late):
            self._hang = watch.hang
            if is_late and self._stop_signal is None:
                self._stop_signal = signal.SIGTERM
            self._stopping = True
            self.kill()

    def _actions(
        self, alive: Sequence[Worker], streams: Sequence[Stream]
    ) -> dict[int, tuple[int, Callable[[], object]]]:
        """For each descriptor, the event to poll for and the function to call then."""
        read = [stream for stream in streams if stream.console is None or not stream.console.crowded]
        readers: dict[int, Callable[[], object]] = {stream.pipe.fileno(): stream.read for stream in read}
        readers |= {worker.pidfd: worker.look for worker in alive if worker.pidfd is not None}
        if (signals := self._signals) is not None:
            readers[signals] = lambda: self._read_signals(os.read(signals, 64))
        terminal = self._terminal
        writers = {kind: partial(terminal.write, kind) for kind in terminal.waiting()} if terminal else {}
        actions = {fd: (select.POLLIN, action) for fd, action in readers.items()}
        return actions | {fd: (select.POLLOUT, action) for fd, action in writers.items()}

    def _settle(self, watched: Sequence[Worker], now: float) -> None:
        """Set a time to stop all workers when a worker has failed; stop and kill them when that time has come."""
        failed = [worker for worker in watched if worker.look() and worker.status]
        for worker in () if self._stopping else failed:
            wait_s = 0.0
            if worker.status == -signal.SIGKILL and not worker.was_stopped and self._stop_signal in _ENDING:
                # no request to end leads to SIGKILL
                self._stop_signal, self.late_stop_signal = None, self._stop_signal
            if self._stop_signal is not None or worker.status == CHECKPOINTED:
                wait_s = self._patience_s
            # its exception may name a rank that is about to raise the same exception
            # or Gloo aborted it because of what another rank has sent, and that rank fails next
            elif worker.is_echo or worker.status == -signal.SIGABRT or self._is_alive(worker.blamed):
                wait_s = _LEAVE_S if any(map(self._way_out, self._alive())) else _ECHO_S
            self._stop_at = min(self._stop_at, now + wait_s)
        if now >= self._stop_at:
            self._stop_at = inf
            self._stop(now)
        if now >= self._kill_at:
            self.kill()

    def _stop(self, now: float) -> None:
        """Send SIGTERM to the remaining workers, and show no output that was held back."""
        self._stopping = True
        self._kill_at = now + self._grace_s
        for worker in self.workers:
            if not worker.look():
                worker.was_stopped = True
                worker.send_group(signal.SIGTERM)
                worker.send_group(signal.SIGCONT)
            for stream in (worker.out, worker.err):
                stream.forget()

    def _read_signals(self, numbers: bytes) -> None:
        for number in numbers:
            if number == signal.SIGTSTP:
                self._suspend()
                continue
            if number in _ENDING:
                self._requested_at = min(self._requested_at, time.monotonic())
            if number == signal.SIGINT:
                if number in (self._stop_signal, self.late_stop_signal):
                    self.kill()
                elif self._terminal:
                    alive = name_ranks([worker.rank for worker in self._alive()])
                    wait = f"at most {self._patience_s:g} s for {alive} to end"
                    self._terminal.say(f"stopping; waiting {wait}; press Ctrl-C again to stop at once")
            self._forward(number)

    def _suspend(self) -> None:
        """At Ctrl-Z: stop the workers with this process, and let them go on with it."""
        for worker in self._alive():
            worker.send_group(signal.SIGSTOP)
        handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, handler)
        for worker in self._alive():
            worker.send_group(signal.SIGCONT)

    def _forward(self, number: int) -> None:
        """Forward a signal to the workers; in a recovery they could not commit, so they get a request to stop."""
        if number in _ENDING:
            ended = [worker.status for worker in self.workers if worker.look() and not worker.was_stopped]
            if set(ended) - {0, CHECKPOINTED}:
                self.late_stop_signal = number
            else:
                self._stop_signal = number
                is_recovering = self._watch is not None and self._watch.is_recovering
                if is_recovering or number == signal.SIGINT:
                    self._stop_at = time.monotonic() + self._patience_s
                if self._watch and is_recovering and self._watch.ask_to_stop(number):
                    return
        for worker in self._alive():
            worker.send(number)

    def _way_out(self, worker: Worker) -> str:
        return self._watch.way_out(worker) if self._watch else ""

    def _hang_that_ranks_reported(self, failed: Sequence[Worker]) -> Hang | None:
        """The hang caused by a rank of this node, if the waiting ranks or Gloo gave up before this process did."""
        hang = None
        if self._watch and any(worker.status == -signal.SIGABRT for worker in failed):
            hang = self._watch.unlike_exchanges(self.workers)
        elif self._watch and failed and all(worker.is_echo for worker in failed):
            hang = self._watch.hang
        return hang if hang and hang.cause.rank in {worker.rank for worker in self.workers} else None

    def _hung(self, watch: Watch, hang: Hang) -> Outcome:
        cause = next((worker for worker in self.workers if worker.rank == hang.cause.rank), self.workers[0])
        failure, traceback, printed = cause.failure, watch.failure(hang), cause.traceback()
        if failure and failure.exception and not cause.is_echo:
            traceback = printed or traceback
        elif self._stop_signal is not None:
            return Outcome(-self._stop_signal, None, traceback, self._stop_signal)
        elif printed and printed.frame and not printed.is_echo:  # such as of a thread that it waits for
            at = f"rank {cause.rank} had printed a traceback: {printed.exception[0]} ({printed.frame.place})"
            traceback = Traceback(traceback.frame, (*traceback.exception, at))
        status = failure.code if failure else 1
        status = status if self._stop_signal is None else -self._stop_signal
        return Outcome(status, cause, traceback, self._stop_signal)

    def _outcome(self) -> Outcome:
        failed = [worker for worker in self.workers if worker.status and not worker.was_stopped]
        self._hang = self._hang or self._hang_that_ranks_reported(failed)
        if self._watch and self._hang:
            return self._hung(self._watch, self._hang)
        if not failed:
            killed = any(worker.was_stopped for worker in self.workers)
            return Outcome(-signal.SIGKILL if killed else 0, None, None, self._stop_signal)
        cause = min(failed, key=_blame)
        left = next((worker for worker in self.workers if not worker.status and self._way_out(worker)), None)
        if left and cause.is_echo:
            code = " with exit code 0" if left.status == 0 else ""
            waited = cause.traceback() or Traceback(None, ())  # where another rank waited, and for what
            code += f" while others waited for it{' in this line' if waited.frame else ''}"
            why = f"rank {left.rank} {self._way_out(left)}{code}"
            calls = [line for line in waited.exception if "different calls" in line]
            return Outcome(1, left, Traceback(waited.frame, (why, *calls)), self._stop_signal)
        if cause.is_echo:
            # A rank may print its traceback and then hang while it exits: it is still the cause.
            since = cause.failed_at - _HANG_S
            hung = [worker for worker in self.workers if since < worker.err.traceback_at < cause.ended_at]
            cause = min([cause, *(worker for worker in hung if worker.was_stopped)], key=_blame)
        # all ranks raise that they differ; prefer a rank that the exception names over the first that raised
        told_by, ranks = cause, cause.blamed
        named = [worker for worker in self.workers if worker.status and worker.rank in ranks]
        cause = min(named, key=_blame, default=cause)
        status = 1 if cause.was_stopped else cause.status or 0
        told = (None if cause.is_echo else cause.traceback()) or told_by.traceback()
        traceback = told if status > 0 or status in _WITH_TRACEBACK else None
        was_asked = self._stop_signal is not None and not _is_own_fault(status, traceback)
        if was_asked or status == CHECKPOINTED or self._stop_signal == signal.SIGINT:
            first = min(failed, key=lambda worker: worker.ended_at)
            return Outcome(first.status or 0, None, None, self._stop_signal)
        return Outcome(status, cause, traceback, self._stop_signal)


def _blame(worker: Worker) -> tuple[bool, bool, float]:
    """Sort key; the smallest is the cause: an own failure comes before a report of another's, then the earliest."""
    failure = worker.failure
    return worker.is_echo, not (failure and failure.ranks and failure.handled), worker.failed_at


def _is_own_fault(status: int, traceback: Traceback | None) -> bool:
    """Whether a worker that was asked to end failed by itself."""
    if status <= 0 or traceback is None or traceback.is_echo:
        return False
    return not traceback.exception[0].startswith("KeyboardInterrupt")
