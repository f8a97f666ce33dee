"""Watches the ranks of a run for one that the others wait for in vain, and says what that rank does.

Covered: ranks that are stopped, loop, hold the GIL, sleep, read without end, skip a call or make one that the others
do not make, have not joined, have left, do not end, or wait for a worker of their loader; on all nodes; also where the
run's directory was removed.
"""

import os
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import inf
from pathlib import Path

import psutil

from samestep.files import open_regular
from samestep.hang import LEAST_S, Hang, RankState, find_hang, state_of
from samestep.rundir import STOP, PulseReading, pulse_in, pulse_path, stack_path
from samestep.start.sight import Sight, look_at, status_of, switches
from samestep.start.worker import Worker
from samestep.tracebacks import Traceback, describe_end

_LOOK_S = 0.5
_ASLEEP_S = 3.0
_LATER_S = 5.0
_STILL_S = 20.0
_GONE_S = 8.0  # what a rank that cannot come any more is waited for
_PATIENCE_S = 600.0
_MOST_PACES = 500
_MOST_LOOKED_AT = 8


class Watch:
    """What the launcher of a node sees of its own ranks, and hears of those of other nodes."""

    def __init__(
        self,
        run: Path,
        size: int,
        say: Callable[[str], object],
        limit_s: float | None = None,
        share: Callable[[Sequence[RankState]], list[RankState]] = lambda _: [],
        is_again: bool = False,
    ) -> None:
        """`limit_s` ends a hung run, by default init's timeout; `share` tells other nodes and hears them."""
        self._run, self._size, self._say = run, size, say
        self._limit_s, self._share, self._is_again = limit_s, share, is_again
        self._look_at = self._awake_at = 0.0
        self._paces: deque[float] = deque(maxlen=_MOST_PACES)
        self._step, self._step_at = -1, time.monotonic()
        self._phases: list[tuple[str, int, int]] = []
        self._changed_at = time.monotonic()
        self._seen: dict[int, tuple[float, Sight]] = {}  # with the begin of the phase it was seen in
        self._quiet: dict[int, tuple[int, float]] = {}  # switches of the main thread, and since when so many
        self._known: dict[int, PulseReading] = {}
        self._gone: dict[int, bool] = {}  # whether a rank of this node has ended or failed
        self._told: Hang | None = None
        self.hang: Hang | None = None
        self._files: dict[Path, int] = {}  # kept open: somebody may remove the directory

    def close(self) -> None:
        for file in self._files.values():
            os.close(file)

    @property
    def least_s(self) -> float:
        """How long ranks wait before it is said: 5 s, or three times the 99th percentile of a step."""
        paces = sorted(self._paces)
        return max(LEAST_S, 3 * paces[int(0.99 * (len(paces) - 1))]) if paces else LEAST_S

    @property
    def has_stepped(self) -> bool:
        """Whether every rank has taken a step."""
        return self._step >= 0

    @property
    def is_stuck(self) -> bool:
        """Whether ranks wait in vain, or none has done anything new for long; what saves may take its time."""
        hang, still_s = self.hang, time.monotonic() - self._changed_at
        if any(phase == "checkpoint" for phase, *_ in self._phases):
            return hang is not None and not any(state.phase == "checkpoint" for state in hang.missing)
        return hang is not None or (bool(self._paces) and still_s >= max(_STILL_S, self.least_s))

    @property
    def is_recovering(self) -> bool:
        """Whether the ranks were started again, perhaps from a state in memory alone, and have taken no step."""
        return self._is_again and not self.has_stepped

    def ask_to_stop(self, number: int) -> None:
        """Have the ranks commit and end because of this signal, as `samestep stop` does."""
        (self._run / STOP).write_text(signal.Signals(number).name)

    @property
    def is_asked_to_stop(self) -> bool:
        """Whether `samestep stop` has asked for it."""
        return (self._run / STOP).exists()

    def look(self, workers: Sequence[Worker], now: float) -> bool:
        """Say who waits for whom, once for each hang; true where it has lasted so long that the run is to end."""
        if now < self._look_at:
            return False
        if now - self._look_at > _ASLEEP_S:
            # this process was stopped, and all of the run perhaps, as Slurm does where jobs take turns
            self._awake_at = self._changed_at = now
            self._quiet.clear()
        self._look_at = now + _LOOK_S
        others = self.tell_others(workers, now)
        states = self._states(now)
        hang = find_hang([*states, *others], self._size, self.least_s) or self._find_leaving(workers, states)
        if self._told and (hang is None or hang.key != self._told.key):
            self._say(f"samestep: {self._told.end}")
            self._told = None
        is_over = hang is not None and hang.seconds >= self._limit_of(hang)
        if hang is not None and (self._told is None or is_over):
            # at the missing ranks, and at one that waits, whose stack tells the line
            for state in [*hang.missing[:_MOST_LOOKED_AT], *hang.waiting[:1]]:
                if state.rank in self._known:
                    self._look_at_rank(state.rank, self._known[state.rank])
            # a rank that loops is not seen so any more at the next look, and its node may not be the one that says it
            others = self._tell(workers, now)
            hang = find_hang([*self._states(now), *others], self._size, self.least_s) or hang
        self.hang = hang
        if hang is None:
            return False
        is_known = all(state.does or state.waits_now or state.phase == "end" for state in hang.missing)
        if self._told is None and (is_known or hang.seconds > 2 * self.least_s):
            self._told = hang
            self._say(f"samestep: {hang.sentence(self.least_s)}")
        return is_over

    def _limit_of(self, hang: Hang) -> float:
        """After how many seconds such a hang ends the run."""
        if not hang.waiting:
            return self._limit_s or inf  # what a rank does after its script may be wanted
        if hang.missing and all(state.is_gone for state in hang.missing):
            return _GONE_S
        patience_s = min((pulse.patience_s for pulse in self._known.values()), default=_PATIENCE_S)
        # the launcher of the missing rank ends the run; where it cannot, another does
        return (self._limit_s or patience_s) + _LATER_S * (hang.cause.rank not in self._gone)

    def tell_others(self, workers: Sequence[Worker], now: float) -> list[RankState]:
        """Tell the other nodes what the ranks here do; what theirs do, and those here that have not joined."""
        self._known = {worker.rank: pulse for worker in workers if (pulse := self._pulse(worker.rank))}
        if self._known:
            self._note_progress(now)
        self._note_quiet(now)
        self._gone = {worker.rank: not worker.is_alive or bool(worker.failure) for worker in workers}
        return self._tell(workers, now)

    def _tell(self, workers: Sequence[Worker], now: float) -> list[RankState]:
        absent = [_not_there(worker) for worker in workers if worker.rank not in self._known]
        return [*absent, *self._share([*self._states(now), *absent])]

    def way_out(self, worker: Worker) -> str:
        """How this rank left the script or is leaving it; "" where it has not."""
        if (pulse := self._pulse(worker.rank)) is None:
            return ""
        if pulse.phase == "end":
            return pulse.call or "came to the end of the script"
        return "ended in the middle of the script" if worker.status == 0 else ""

    def failure(self, hang: Hang) -> Traceback:
        """The hang as what ended the run."""
        _, sight = self._seen.get(hang.cause.rank, (0.0, Sight()))
        return Traceback(sight.frame, (hang.sentence(self.least_s),))

    def _pulse(self, rank: int) -> PulseReading | None:
        """What this rank last wrote; its files are opened as soon as they are there."""
        for path in (stack_path(self._run, rank), at := pulse_path(self._run, rank)):
            if path not in self._files:
                with suppress(OSError):
                    self._files[path] = open_regular(path, 2)
        return pulse_in(self._files[at]) if at in self._files else None

    def _find_leaving(self, workers: Sequence[Worker], states: Sequence[RankState]) -> Hang | None:
        """The ranks that are left, where each of them has left its script for long and does not end."""
        alive = [worker.rank for worker in workers if worker.is_alive]
        left = [state for state in states if state.rank in alive and state.phase == "end"]
        seconds = min((state.seconds for state in left), default=0.0)
        is_long = len(left) == len(alive) and seconds >= 2 * self.least_s
        return Hang((), tuple(left), seconds) if is_long else None

    def _states(self, now: float) -> list[RankState]:
        found = []
        for rank, pulse in self._known.items():
            seconds = now - max(pulse.phase_began, self._awake_at)
            state = state_of(rank, pulse, seconds, os.uname().nodename)._replace(is_gone=self._gone[rank])
            seen_in, sight = self._seen.get(rank, (0.0, Sight()))
            if seen_in == pulse.phase_began:
                line = sight.frame.place if sight.frame else ""
                state = state._replace(line=line, does=sight.does)
                quiet_s = now - self._quiet[rank][1]
                if sight.has_left:
                    state = state._replace(phase="end", seconds=min(quiet_s, state.seconds))
                if sight.wait and not state.waits_now:
                    # of the script itself or of DDP: nobody counted it
                    waits = state.waits + 1
                    state = state._replace(
                        phase="call", call=sight.wait, waits=waits, seconds=quiet_s, does=""
                    )
            found.append(state)
        return found

    def _look_at_rank(self, rank: int, pulse: PulseReading) -> None:
        stacks = self._files.get(stack_path(self._run, rank))
        self._seen[rank] = pulse.phase_began, look_at(pulse.pid, stacks)
        self._quiet[rank] = switches(pulse.pid), self._quiet[rank][1]  # writing the stack is not going on

    def _note_quiet(self, now: float) -> None:
        """A rank whose main thread sleeps for long in a call of torch.distributed waits there."""
        for rank, pulse in self._known.items():
            count, since = switches(pulse.pid), self._quiet.get(rank, (-1, now))
            if count != since[0]:
                self._quiet[rank] = count, now
                self._seen.pop(rank, None)
            elif now - since[1] >= self.least_s and self._seen.get(rank, (0.0,))[0] != pulse.phase_began:
                self._look_at_rank(rank, pulse)

    def _note_progress(self, now: float) -> None:
        phases = [(pulse.phase, pulse.step, pulse.waits) for pulse in self._known.values()]
        if phases != self._phases:
            self._phases, self._changed_at = phases, now
        step = min(pulse.step for pulse in self._known.values())
        if step > self._step:
            if self._step >= 0:
                taken = step - self._step
                self._paces.extend([(now - self._step_at) / taken] * min(taken, _MOST_PACES))
            self._step, self._step_at = step, now


def _not_there(worker: Worker) -> RankState:
    """A rank that has not come to init."""
    does = "has not come to samestep.init"
    if not worker.is_alive:
        does = f"ended before it came to samestep.init ({describe_end(worker.status or 0)})"
    elif status_of(worker.pid) == psutil.STATUS_STOPPED:
        does = "is stopped (SIGSTOP)"
    host, is_gone = os.uname().nodename, not worker.is_alive
    return RankState(worker.rank, -1, "start", "", 0, 0.0, host, does=does, is_gone=is_gone)
