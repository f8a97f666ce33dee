"""Watches the ranks of a run for one that the others wait for in vain, and says what that rank does.

Covered: ranks that are stopped, loop, hold the GIL, sleep, read without end, skip a call or make one that the others
do not make, have left, or wait for a worker of their loader; on all nodes. Not covered: ranks that have not joined yet.
"""

import os
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from samestep.hang import LEAST_S, Hang, RankState, find_hang, state_of
from samestep.rundir import PulseReading, pulse_path, read_pulse, stack_path, stop_path
from samestep.start.sight import Sight, look_at, switches
from samestep.start.worker import Worker
from samestep.tracebacks import Traceback

_LOOK_S = 0.5
_LATER_S = 5.0
_STILL_S = 20.0
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
        self._look_at = 0.0
        self._paces: deque[float] = deque(maxlen=_MOST_PACES)
        self._step, self._step_at = -1, time.monotonic()
        self._phases: list[tuple[str, int, int]] = []
        self._changed_at = time.monotonic()
        self._seen: dict[int, tuple[float, Sight]] = {}  # with the begin of the phase it was seen in
        self._quiet: dict[int, tuple[int, float]] = {}  # switches of the main thread, and since when so many
        self._told: Hang | None = None
        self.hang: Hang | None = None

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
        stop_path(self._run).write_text(signal.Signals(number).name)

    @property
    def is_asked_to_stop(self) -> bool:
        """Whether `samestep stop` has asked for it."""
        return stop_path(self._run).exists()

    def look(self, workers: Sequence[Worker], now: float) -> bool:
        """Say who waits for whom, once for each hang; true where it has lasted so long that the run is to end."""
        if now < self._look_at:
            return False
        self._look_at = now + _LOOK_S
        pulses = {worker.rank: read_pulse(pulse_path(self._run, worker.rank)) for worker in workers}
        known = {rank: pulse for rank, pulse in pulses.items() if pulse}
        if not known:
            return False
        self._note_progress(known, now)
        self._note_quiet(known, now)
        others = self._share(self._states(known, now))
        hang = find_hang([*self._states(known, now), *others], self._size, self.least_s)
        if self._told and (hang is None or hang.key != self._told.key):
            self._say(f"samestep: {self._told.end}")
            self._told = None
        limit_s = self._limit_s or min(pulse.patience_s for pulse in known.values())
        # the launcher of the missing rank ends the run; where it cannot, another does
        is_over = hang is not None and hang.seconds >= limit_s + _LATER_S * (hang.cause.rank not in known)
        if hang is not None and (self._told is None or is_over):
            self._look_closely(hang, known)
            hang = find_hang([*self._states(known, now), *others], self._size, self.least_s) or hang
        self.hang = hang
        if hang is None:
            return False
        is_known = all(state.does or state.waits_now for state in hang.missing)
        if self._told is None and (is_known or hang.seconds > 2 * self.least_s):
            self._told = hang
            self._say(f"samestep: {hang.sentence(self.least_s)}")
        return is_over

    def way_out(self, worker: Worker) -> str:
        """How this rank left the script or is leaving it; "" where it has not."""
        pulse = read_pulse(pulse_path(self._run, worker.rank))
        if pulse is None or (pulse.phase != "end" and worker.status != 0):
            return ""
        return pulse.call if pulse.phase == "end" and pulse.call else "came to the end of the script"

    def failure(self, hang: Hang) -> Traceback:
        """The hang as what ended the run."""
        _, sight = self._seen.get(hang.cause.rank, (0.0, Sight()))
        return Traceback(sight.frame, (hang.sentence(self.least_s),))

    def _states(self, pulses: dict[int, PulseReading], now: float) -> list[RankState]:
        found = []
        for rank, pulse in pulses.items():
            state = state_of(rank, pulse, now - pulse.phase_began, os.uname().nodename)
            seen_in, sight = self._seen.get(rank, (0.0, Sight()))
            if seen_in == pulse.phase_began:
                state = state._replace(line=sight.line, does="" if state.waits_now else sight.does)
                if sight.wait and not state.waits_now:
                    # of the script itself or of DDP: nobody counted it
                    quiet_s = now - self._quiet[rank][1]
                    state = state._replace(
                        phase="call", call=sight.wait, waits=state.waits + 1, seconds=quiet_s
                    )
            found.append(state)
        return found

    def _look_closely(self, hang: Hang, pulses: dict[int, PulseReading]) -> None:
        """At the missing ranks, and at one that waits, whose stack tells the line."""
        for state in [*hang.missing[:_MOST_LOOKED_AT], *hang.waiting[:1]]:
            if state.rank in pulses:
                self._look_at_rank(state.rank, pulses[state.rank])

    def _look_at_rank(self, rank: int, pulse: PulseReading) -> None:
        self._seen[rank] = pulse.phase_began, look_at(pulse.pid, stack_path(self._run, rank))
        self._quiet[rank] = switches(pulse.pid), self._quiet[rank][1]  # writing the stack is not going on

    def _note_quiet(self, pulses: dict[int, PulseReading], now: float) -> None:
        """A rank whose main thread sleeps for long in a call of torch.distributed waits there."""
        for rank, pulse in pulses.items():
            count, since = switches(pulse.pid), self._quiet.get(rank, (-1, now))
            if count != since[0]:
                self._quiet[rank] = count, now
                self._seen.pop(rank, None)
            elif now - since[1] >= self.least_s and self._seen.get(rank, (0.0,))[0] != pulse.phase_began:
                self._look_at_rank(rank, pulse)

    def _note_progress(self, pulses: dict[int, PulseReading], now: float) -> None:
        phases = [(pulse.phase, pulse.step, pulse.waits) for pulse in pulses.values()]
        if phases != self._phases:
            self._phases, self._changed_at = phases, now
        step = min(pulse.step for pulse in pulses.values())
        if step > self._step:
            if self._step >= 0:
                taken = step - self._step
                self._paces.extend([(now - self._step_at) / taken] * min(taken, _MOST_PACES))
            self._step, self._step_at = step, now
