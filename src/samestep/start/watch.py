"""Detects hangs: finds ranks that others wait for in vain, and reports what those ranks do.

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

from samestep.files import make_private_directory, open_regular
from samestep.hang import ABSENT, GONE_S, LEAST_S, Hang, RankState, find_hang, find_unlike_exchanges, state_of
from samestep.rundir import STOP, PulseReading, pulse_in, pulse_path, stack_path
from samestep.start.sight import STOPPED, Sight, look_at, status_of, switches
from samestep.start.worker import Worker
from samestep.text import duration, printable
from samestep.tracebacks import Traceback, describe_end

_LOOK_S = 0.5  # between two looks
_ASLEEP_S = 3.0  # after a longer gap between looks, this process was suspended
_LATER_S = 5.0  # how much longer other launchers wait than that of the missing rank
_STILL_S = 20.0  # ranks without progress for this long are stuck
_PATIENCE_S = 600.0  # the timeout if no rank has written its own
_MOST_PACES = 500
_MOST_LOOKED_AT = 8
_LATE_S = 0.5  # for what a rank has started to end after it
_MOST_SHOWN = 80  # characters of a command


class Watch:
    """Observes the ranks of this node, and exchanges what they do with the launchers of other nodes."""

    def __init__(
        self,
        run: Path,
        size: int,
        say: Callable[[str], object],
        limit_s: float | None = None,
        share: Callable[[Sequence[RankState]], list[RankState]] = lambda _: [],
        *,
        is_again: bool = False,
    ) -> None:
        """`limit_s` ends a hung run, by default init's timeout; `share` exchanges states with other nodes."""
        self._run, self._size, self._say = run, size, say
        self._limit_s, self._share, self._is_again = limit_s, share, is_again
        self._is_blind, self.named = False, set[psutil.Process]()  # what was named that lives on
        self._look_at = self._awake_at = 0.0
        self._paces: deque[float] = deque(maxlen=_MOST_PACES)  # seconds of the latest steps
        self._step, self._phases = -1, list[tuple[str, int, int]]()
        self._began = self._step_at = self._changed_at = time.monotonic()
        self._seen: dict[int, tuple[float, Sight]] = {}  # by rank: when its phase began, and what was seen
        self._idle: dict[int, tuple[int, float]] = {}  # context switches, and since when they are so many
        self._pulses: dict[int, PulseReading] = {}
        self._gone: dict[int, bool] = {}  # whether a rank of this node has ended or failed
        self._reported: Hang | None = None
        self.hang: Hang | None = None
        self._files: dict[Path, int] = {}  # open descriptors: the run's directory may be removed

    def close(self) -> None:
        for file in self._files.values():
            os.close(file)

    @property
    def least_s(self) -> float:
        """How long ranks wait before a hang is reported: 5 s, or three times the 99th percentile of a step."""
        paces = sorted(self._paces)
        return max(LEAST_S, 3 * paces[int(0.99 * (len(paces) - 1))]) if paces else LEAST_S

    @property
    def has_stepped(self) -> bool:
        """Whether every rank has taken a step."""
        return self._step >= 0

    @property
    def is_stuck(self) -> bool:
        """Whether ranks wait in vain, or no rank has made progress for long; a rank that saves may take longer."""
        hang, still_s = self.hang, time.monotonic() - self._changed_at
        if any(phase == "checkpoint" for phase, *_ in self._phases):
            return hang is not None and not any(state.phase == "checkpoint" for state in hang.missing)
        return hang is not None or (bool(self._paces) and still_s >= max(_STILL_S, self.least_s))

    @property
    def is_recovering(self) -> bool:
        """Whether the ranks were restarted, perhaps from a state that is only in memory, and have taken no step yet."""
        return self._is_again and not self.has_stepped

    def ask_to_stop(self, number: int) -> bool:
        """Make the ranks commit and end because of this signal, as `samestep stop` does; False if that fails."""
        with suppress(OSError):  # on a full disk the file is empty, and a request too
            make_private_directory(self._run)
            (self._run / STOP).write_text(signal.Signals(number).name)
        return self.is_asked_to_stop

    @property
    def is_asked_to_stop(self) -> bool:
        return os.path.exists(self._run / STOP)

    def look(self, workers: Sequence[Worker], now: float, has_to_end: bool) -> bool:
        """Report each hang once; returns whether the run must end: too long a hang, or it `has_to_end` and is stuck."""
        if now < self._look_at:
            return False
        if now - self._look_at > _ASLEEP_S:
            # this process was suspended, perhaps with the whole run: Slurm does so when jobs take turns
            self._awake_at = self._changed_at = now
            self._idle.clear()
        self._look_at = now + _LOOK_S
        others = self.tell_others(workers, now)
        states = self._states(now)
        hang = find_hang([*states, *others], self._size, self.least_s)
        hang = hang or self._find_leaving(workers, states) or self._find_left(workers, states, now)
        if self._reported and (hang is None or hang.key != self._reported.key):
            self._say(f"samestep: {self._reported.end}")
            self._reported = None
        self.hang = hang
        is_too_long = hang is not None and hang.seconds >= self._limit_of(hang)
        is_over = is_too_long or (has_to_end and self.is_stuck)
        if hang is not None and (self._reported is None or is_over):
            # read the stacks of the missing ranks, and of a waiting rank for its line
            for state in [*hang.missing[:_MOST_LOOKED_AT], *hang.waiting[:1]]:
                if state.rank in self._pulses:
                    self._look_at_rank(state.rank, self._pulses[state.rank])
            # share it now: at the next look the rank may be elsewhere, and another node may print the report
            others = self._tell(workers, now)
            hang = find_hang([*self._states(now), *others], self._size, self.least_s) or hang
        self.hang = hang
        if hang is None:
            return is_over
        is_known = all(state.does or state.waits_now or state.phase == "end" for state in hang.missing)
        if self._reported is None and (is_known or hang.seconds > 2 * self.least_s):
            self._reported = hang
            self._say(f"samestep: {hang.sentence(self.least_s)}{self._end_of(hang)}")
        return is_over

    def _end_of(self, hang: Hang) -> str:
        """When the run ends, if no rank can go on."""
        left_s = self._limit_of(hang) - hang.seconds
        is_ahead = hang.is_deadlock and left_s > 1
        return f"; the run ends in {duration(left_s)}, see --hang-timeout" if is_ahead else ""

    def _limit_of(self, hang: Hang) -> float:
        """After how many seconds this hang ends the run."""
        if not hang.waiting:
            return self._limit_s or inf  # work that a rank does after its script may be intended
        if hang.missing and all(state.is_gone for state in hang.missing):
            return GONE_S
        patience_s = min((pulse.patience_s for pulse in self._pulses.values()), default=_PATIENCE_S)
        # the missing rank's launcher ends the run first, because it knows most; the others wait a little longer
        return (self._limit_s or patience_s) + _LATER_S * (hang.cause.rank not in self._gone)

    def tell_others(self, workers: Sequence[Worker], now: float) -> list[RankState]:
        """Send this node's states to the other nodes; returns theirs, and those of ranks here that have not joined."""
        self._pulses = {worker.rank: pulse for worker in workers if (pulse := self._pulse(worker.rank))}
        if self._pulses:
            self._note_progress(now)
        elif self._limit_s and not self._is_blind and now - self._began >= self._limit_s:
            self._is_blind = True
            self._say(
                "samestep: no rank has called samestep.init yet, and --hang-timeout ends no hang before that"
            )
        self._note_idle(now)
        self._gone = {worker.rank: not worker.is_alive or bool(worker.failure) for worker in workers}
        return self._tell(workers, now)

    def _tell(self, workers: Sequence[Worker], now: float) -> list[RankState]:
        absent = [_absent_state(worker) for worker in workers if worker.rank not in self._pulses]
        return [*absent, *self._share([*self._states(now), *absent])]

    def unlike_exchanges(self, workers: Sequence[Worker]) -> Hang | None:
        """The ranks that exchange gradients of another model than the others: the exchange aborts."""
        now = time.monotonic()
        others = self.tell_others(workers, now)
        return find_unlike_exchanges([*self._states(now), *others], self._size)

    def end_daemons(self, workers: Sequence[Worker], grace_s: float) -> None:
        """Kill ranks that go on in sessions of their own; name what else ranks put there: it may hold a device."""
        ranks, left = {str(worker.rank) for worker in workers}, list[psutil.Process]()
        daemons = {pulse.pid: rank for rank, pulse in self._pulses.items()}
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                env, rank = process.environ(), daemons.get(process.pid)
                is_named = env.get("SAMESTEP_RUN") == str(self._run) and env.get("RANK") in ranks
                # a later process may have the number of one that has ended
                if is_named or (rank is not None and process.create_time() <= self._pulses[rank].unix):
                    left.append(process)
        alive = psutil.wait_procs(left, max(grace_s, _LATE_S))[1]
        for process in [process for process in alive if process not in self.named][:_MOST_LOOKED_AT]:
            self.named.add(process)
            with suppress(psutil.Error):
                pid, rank = process.pid, daemons.get(process.pid)
                name = printable(" ".join(process.cmdline()), _MOST_SHOWN)
                said = f"process {pid}, which rank {process.environ().get('RANK')} started apart, lives on: {name}"
                if rank is not None:
                    process.kill()
                    said = f"rank {rank} went on in the background as process {pid}; it was killed"
                self._say(f"samestep: {said}")

    def way_out(self, worker: Worker) -> str:
        """How this rank left the script or is leaving it; "" if it is still inside."""
        if (pulse := self._pulse(worker.rank)) is None:
            return ""
        if pulse.phase == "end":
            return pulse.call or "came to the end of the script"
        return "ended in the middle of the script" if worker.status == 0 else ""

    def failure(self, hang: Hang) -> Traceback:
        """The hang in the form of an exception that ended the run."""
        _, sight = self._seen.get(hang.cause.rank, (0.0, Sight()))
        return Traceback(sight.frame, (hang.sentence(self.least_s),))

    def _pulse(self, rank: int) -> PulseReading | None:
        """The pulse of this rank; opens its files as soon as they exist."""
        for path in (stack_path(self._run, rank), pulse_file := pulse_path(self._run, rank)):
            if path not in self._files:
                with suppress(OSError):
                    self._files[path] = open_regular(path, 2, os.O_RDWR)
        with suppress(OSError, KeyError):  # of a network file system; it is not there yet
            pulse = pulse_in(self._files[pulse_file])
            return pulse if pulse and pulse.monotonic > self._began else None  # not an earlier start's
        return None

    def _find_leaving(self, workers: Sequence[Worker], states: Sequence[RankState]) -> Hang | None:
        """A hang at exit: every rank that is still alive left its script long ago and does not end."""
        alive = [worker.rank for worker in workers if worker.is_alive]
        leaving = [state for state in states if state.rank in alive and state.phase == "end"]
        seconds = min((state.seconds for state in leaving), default=0.0)
        is_long = len(leaving) == len(alive) and seconds >= 2 * self.least_s
        return Hang((), tuple(leaving), seconds) if is_long else None

    def _find_left(self, workers: Sequence[Worker], states: Sequence[RankState], now: float) -> Hang | None:
        """A hang of the last ranks, after all others have ended: they are stopped, or do nothing for --hang-timeout."""
        alive = {worker.rank: worker for worker in workers if worker.is_alive}
        last = [state for state in states if state.rank in alive and state.phase != "end"]
        if not len(last) == len(alive) < len(workers) == self._size:
            return None
        seconds = min((now - self._idle[state.rank][1] for state in last), default=0.0)
        limit_s = 2 * self.least_s if all(map(_is_stopped, last)) else self._limit_s or inf
        if seconds < limit_s:
            return None
        with suppress(psutil.Error):
            if any(psutil.Process(alive[state.rank].pid).children() for state in last):
                return None  # it may wait for a program that it has started, such as an upload
        return Hang((), tuple(last), seconds)

    def _states(self, now: float) -> list[RankState]:
        states = []
        for rank, pulse in self._pulses.items():
            seconds = now - max(pulse.phase_began, self._awake_at)
            state = state_of(rank, pulse, seconds, os.uname().nodename)._replace(is_gone=self._gone[rank])
            seen_in, sight = self._seen.get(rank, (0.0, Sight()))
            if seen_in == pulse.phase_began:
                line = sight.frame.place if sight.frame else ""
                state = state._replace(line=line, does=sight.does)
                idle_s = now - self._idle[rank][1]
                if sight.has_left:
                    state = state._replace(phase="end", seconds=min(idle_s, state.seconds))
                if sight.wait and not state.waits_now:
                    # a wait in a call of the script itself or of DDP, which the pulse does not count
                    state = state._replace(phase="call", call=sight.wait, seconds=idle_s, does="")
                    state = state._replace(waits=state.waits + 1)
            states.append(state)
        return states

    def _look_at_rank(self, rank: int, pulse: PulseReading) -> None:
        stacks = self._files.get(stack_path(self._run, rank))
        asks = self._files[pulse_path(self._run, rank)]
        self._seen[rank] = pulse.phase_began, look_at(pulse, asks, stacks)
        # writing a stack is no progress
        self._idle[rank] = switches(pulse.pid, pulse.thread[1]), self._idle[rank][1]

    def _note_idle(self, now: float) -> None:
        """Look at each rank whose training thread has slept for long: it may wait in a call of torch.distributed."""
        for rank, pulse in self._pulses.items():
            count, since = switches(pulse.pid, pulse.thread[1]), self._idle.get(rank, (-1, now))
            if count != since[0]:
                self._idle[rank] = count, now
                self._seen.pop(rank, None)
            elif now - since[1] >= self.least_s and self._seen.get(rank, (0.0,))[0] != pulse.phase_began:
                self._look_at_rank(rank, pulse)

    def _note_progress(self, now: float) -> None:
        phases = [(pulse.phase, pulse.step, pulse.waits) for pulse in self._pulses.values()]
        if phases != self._phases:
            self._phases, self._changed_at = phases, now
        step = min(pulse.step for pulse in self._pulses.values())
        if step > self._step:
            if self._step >= 0:
                taken = step - self._step
                self._paces.extend([(now - self._step_at) / taken] * min(taken, _MOST_PACES))
            self._step, self._step_at = step, now


def _is_stopped(state: RankState) -> bool:
    return state.does == STOPPED


def _absent_state(worker: Worker) -> RankState:
    """The state of a rank that has not reached samestep.init."""
    does = ABSENT
    if not worker.is_alive:
        does = f"ended before it came to samestep.init ({describe_end(worker.status or 0)})"
    elif status_of(worker.pid) == psutil.STATUS_STOPPED:
        does = STOPPED
    host, is_gone = os.uname().nodename, not worker.is_alive
    return RankState(worker.rank, -1, "start", "", 0, 0.0, host, does=does, is_gone=is_gone)
