"""Requests to stop a run: a signal, a time limit or a file sets a flag; signal handlers do nothing else."""

import math
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType

from samestep.errors import RankMissing
from samestep.files import read_text
from samestep.rundir import STOP, TIME_UP
from samestep.train.group.group import Group

_LOOK_S = 0.3
_ANSWER_S = 0.01
_LEAVE_S = 2.0
# SIGHUP: the terminal or the connection to it was closed
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)


class StopRequests:
    """The requests that this process has received."""

    def __init__(self) -> None:
        self.heard: int | None = None
        self._end = _moment("SLURM_JOB_END_TIME")
        begun = _moment("SLURM_JOB_START_TIME") or time.time()
        self.job_seconds = self._end - begun if self._end is not None else math.inf
        run = os.environ.get("SAMESTEP_RUN")
        self._run = Path(run) if run else None
        if threading.current_thread() is threading.main_thread():
            # a signal that was ignored from the start (SIGINT in a shell's background job) stays ignored
            for number in _SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    signal.signal(number, self._hear)

    def asked(self, margin_seconds: float) -> str:
        """Why this process should stop now, or ""; the margin is the time needed before the job's time limit."""
        if self.heard is not None:
            return signal.Signals(self.heard).name
        if self._end is not None and time.time() > self._end - margin_seconds:
            if self._run is not None:
                # tells the launcher not to start the run again: the job is about to end
                with suppress(OSError):
                    (self._run / TIME_UP).touch()
            return "the job's time limit"
        if self._run is not None and (self._run / STOP).exists():
            asked_by = read_text(self._run / STOP)  # a launcher names its signal there
            return asked_by if asked_by in signal.Signals.__members__ else "samestep stop"
        return ""

    def fulfilled(self) -> None:
        """The state is committed: from now on ignore signals, which would change this process's exit code."""
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        if note := os.environ.get("SAMESTEP_STOPPED"):  # torchrun loses the exit code
            with suppress(OSError):
                Path(note).touch()

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.heard == signal.SIGINT == number:
            raise KeyboardInterrupt
        self.heard = number


class CommonStep:
    """Finds a step after which all ranks decide together, soon after any rank has a reason to."""

    # A thread of each rank looks for reasons, its own and in the store. If there is a reason, it writes into the store
    # which step its rank will finish next, and at that step the rank waits until all ranks have written theirs. The
    # latest of these steps is the common step: no rank has passed it. A step without a reason costs nothing.

    def __init__(self, group: Group, number: int, has_reason: Callable[[float], bool]) -> None:
        """`number` tells it from others of the group; `has_reason` gets the seconds that a step takes."""
        self._group, self._has_reason = group, has_reason
        self._store, self._prefix = group.store, f"samestep/common step/{number}"
        self._lock, self._known, self._closed = threading.Lock(), threading.Event(), threading.Event()
        self._steps, self._round, self._is_counting = 0, 0, False
        self.pace = 0.0  # seconds of a step
        self._next: int | None = None
        self._common: int | None = None
        self._thread = threading.Thread(target=self._look, name="samestep-common-step", daemon=True)
        self._thread.start()

    def reached(self, steps: int, *, now: bool) -> bool:
        """Whether all ranks decide after this step, as they do after the first; `now`: this rank has a reason."""
        with self._lock:
            is_first, self._is_counting, self._steps = not self._is_counting, True, steps
            if now and self._next is None and not is_first:
                self._next = steps
        if is_first or self._next is None:
            return is_first
        if steps == self._next:
            self._wait(steps)
        return steps == self._common

    def decided(self, *, is_first: bool = False) -> None:
        """Collective. The ranks have decided; with `is_first` they begin to count again."""
        with self._lock:
            self._round += 1
            self._next = self._common = None
            self._is_counting = not is_first
            self._known.clear()

    def close(self) -> None:
        self._closed.set()
        self._thread.join(_LEAVE_S)

    def _wait(self, steps: int) -> None:
        """Wait until every rank has written which step it will finish next."""
        with self._group.waiting("samestep.Checkpoint.step"):
            self._known.wait(self._group.timeout.total_seconds())
        if self._common is None:
            raise RankMissing(
                f"a rank ended, or did not answer, when this one asked after step {steps} for a common step; that "
                "rank's own error says why",
                call="samestep.Checkpoint.step",
            )

    def _look(self) -> None:
        seen, since = 0, time.monotonic()
        try:
            while not self._closed.wait(_ANSWER_S if self._next is not None else _LOOK_S):
                now, steps = time.monotonic(), self._steps
                self.pace = (now - since) / (steps - seen) if steps > seen else max(self.pace, now - since)
                if steps != seen:
                    seen, since = steps, now
                if self._common is None and self._is_counting:
                    self._answer()
        except (RuntimeError, RankMissing):  # a rank has ended
            self._known.set()

    def _answer(self) -> None:
        number = self._round
        keys = [f"{self._prefix}/{number}/{rank}" for rank in range(self._group.world.size)]
        if self._next is None:
            if not self._has_reason(self.pace) and not any(self._store.check([key]) for key in keys):
                return
            with self._lock:
                if self._next is None and self._is_counting and number == self._round:
                    self._next = self._steps + 1
        own = self._next
        if own is None or number != self._round:
            return
        if not self._store.check([keys[self._group.world.rank]]):
            self._store.set(keys[self._group.world.rank], str(own))
        if self._store.check(keys):
            latest = max(int(self._store.get(key)) for key in keys)
            with self._lock:
                if number == self._round:
                    self._common = latest
                    self._known.set()


def _moment(name: str) -> float | None:
    text = os.environ.get(name, "")
    return float(text) if text.isdecimal() else None
