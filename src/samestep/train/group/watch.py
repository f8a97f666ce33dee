"""Names the rank that hangs or fails, where `samestep run` is not the launcher: the ranks watch each other.

While some ranks wait, all tell each other what they do. Covered: a rank that runs Python, that waits in another call,
also of torch.distributed, or that gives no answer because it is stopped or holds the GIL. A rank that fails, or leaves
the script with an exit code while others go on, ends all of them, also where a thread keeps it from ending.
Under srun a step with a rank that gives no answer is killed once the others have failed. Not covered: ending a run that
hangs before init's timeout, unless `samestep stop` asks for it.
"""

import faulthandler
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import sha256
from math import inf
from pathlib import Path
from typing import Any

import psutil

from samestep.errors import RankMissing, SamestepError
from samestep.failure import (
    failure_of,
    frames_of_thread,
    handled_by_thread,
    heading,
    torchs_wait,
    users_frame,
)
from samestep.hang import GONE_S, LEAST_S, STUCK_S, Hang, RankState, find_hang, named_models
from samestep.rendezvous.channel import as_kind
from samestep.rendezvous.member import say
from samestep.rendezvous.tree import Tree
from samestep.rundir import STOP, WAITS, Pulse, own_run
from samestep.tracebacks import recorded_traceback

_LOOK_S = 1.0
_ANSWER_S = 0.25  # between two looks whether the stacks are asked for
# at most so many messages a second reach a rank, from all ranks together
_MESSAGES = 500
_WORTH_TELLING_S = 2.0
_FRESH_LOOKS = 3
_LEAVE_S = 2.0
_LOST_S = 0.5  # the tree may notice the end of a process later than torch
_MOST_SAID = 120
_ENDS = "ends"
_SILENT = "gives no answer (is it stopped, or does it hold the GIL?)"


class MutualWatch:
    """A thread that tells the other ranks what this rank does; it sends nothing while no rank waits for long."""

    def __init__(self, group: Any, tree: Tree) -> None:
        self._group, self._tree, self._look_s = group, tree, max(_LOOK_S, tree.size / _MESSAGES)
        self._heard: dict[int, tuple[float, RankState]] = {}  # each rank's latest state, and when it arrived
        self._told: Hang | None = None
        self._hang: tuple[float, Hang] | None = None  # the latest, and when it was seen
        self._why = ""  # what is known of the rank that an exception of this rank reports
        self._quiet = -1, 0.0  # the number of context switches, and since when it has not changed
        self._closed, self._speaks = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._run, name="samestep-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join(_LEAVE_S)

    def end_all(self, code: int) -> None:
        """Make the other ranks end with this exit code, as this rank does."""
        self._tree.tell([_ENDS, code])

    def tell_failure(self, error: BaseException, show_traceback: Callable[[], None]) -> None:
        """Show what ended this rank: a line if another rank is the cause, otherwise the traceback and a report."""
        world, record = self._group.world, failure_of(error, 1)
        failure = recorded_traceback(record)
        if failure.is_echo and not record.handled:
            step = self._step_to_kill()
            # that rank may send an exit code to end with; a SIGTERM from srun must not come first
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            with self._speaks:
                why = self._why or failure.exception[0]
                if not self._why and not isinstance(error, SamestepError):
                    why = f"another rank {'has not come' if 'imed out' in why else 'has ended'} ({why})"
                say(f"rank {world.rank} of {world.size} ended in {failure.lines[0].strip()}: {why}")
            time.sleep(_LEAVE_S)
            if step:
                say(f"job step {step} is killed, since a rank of it gives no answer")
                subprocess.run(["scancel", "--signal=KILL", step], check=False)
            return
        if (first := self._first_to_raise(failure.lines)) != world.rank:
            say(f"rank {world.rank} of {world.size} failed as rank {first} did: {failure.exception[0]}")
            return
        show_traceback()
        place, began = f"{os.uname().nodename}, {world.device}", psutil.Process().create_time()
        file, lasted_s = Path(sys.argv[0]).name, time.time() - began
        head = heading(file, world.rank, world.size, place, lasted_s, self._group.step)
        print("", head, "", *failure.lines, sep="\n", file=sys.stderr, flush=True)

    def cause_of(self, error: BaseException) -> str:
        """Which rank is lost, or is waited for, where an exception of torch or Gloo only reports that; "" elsewhere."""
        record = failure_of(error, 1)
        if isinstance(error, SamestepError) or record.handled or not recorded_traceback(record).is_echo:
            return ""
        until, hang = time.monotonic() + _LOST_S, self._latest_hang
        while (gone := self._tree.gone()) is None and time.monotonic() < until:
            time.sleep(_LOST_S / 10)
        self._why = str(gone) if gone else hang.sentence(LEAST_S) if hang else ""
        return self._why

    @property
    def _latest_hang(self) -> Hang | None:
        """The hang that was seen a moment ago."""
        at, hang = self._hang or (-inf, None)
        return hang if time.monotonic() - at < _FRESH_LOOKS * self._look_s else None

    def _step_to_kill(self) -> str:
        """The job step of a rank that gives no answer, for which srun would wait until the job's time limit."""
        hang = self._latest_hang
        if hang is None or self._group.world.launcher != "slurm" or not shutil.which("scancel"):
            return ""
        is_first = min(state.rank for state in hang.waiting) == self._tree.number
        is_silent = any(state.does == _SILENT for state in hang.missing)
        return "{SLURM_JOB_ID}.{SLURM_STEP_ID}".format_map(os.environ) if is_first and is_silent else ""

    def _first_to_raise(self, lines: Sequence[str]) -> int:
        """The first of all ranks that failed with these lines; its report is enough."""
        mine = b"%d" % self._tree.number
        key = "samestep/raised/" + sha256("\n".join(lines).encode()).hexdigest()
        with suppress(RankMissing):  # the first may have left; then its mark is here
            self._tree.change("replace", key, mine, limit_s=_LEAVE_S)
        return int(self._tree.stored.get(key, mine))

    def _run(self) -> None:
        failed = False
        while not self._closed.wait(self._look_s):
            try:
                self._look_around()
                failed = False
            except Exception:  # reading the stack of a thread that runs may fail, but not twice in a row
                if failed:
                    raise
                failed = True

    def _look_around(self) -> None:
        lost = self._tree.lost  # who is lost may have told an exit code before
        with self._speaks:
            self._hear()
        if not lost:
            self._look()
        elif (state := self._state()).waits_now and state.seconds > LEAST_S:
            # as where a child of the lost rank keeps its connections of torch's open
            (state,) = named_models([state])
            say(f"rank {state.rank} is ended in {state.wait}: {lost}")
            self._group.leaving.end(1)

    def _hear(self) -> None:
        for rank, told in self._tree.take_news(_news_from):
            if isinstance(told, int):
                if self._group.leaving.failed is None:
                    why = f"since rank {rank} has ended with exit code {told}"
                    say(f"rank {self._tree.number} is ended, {why}")
                self._group.leaving.end(told)
            elif 0 <= told.rank < self._tree.size:
                self._heard[told.rank] = time.monotonic(), told

    def _look(self) -> None:
        now, mine = time.monotonic(), self._state()
        fresh_s = _FRESH_LOOKS * self._look_s
        known = [mine, *(state for at, state in self._heard.values() if now - at < fresh_s)]
        if any(state.waits_now and state.seconds > _WORTH_TELLING_S for state in known):
            self._tree.tell(mine)
        silent = self._silent(known, fresh_s)
        for state in silent:
            self._tree.tell(state)
        states = {state.rank: state for state in (*known, *silent)}
        hang = find_hang([*states.values()], self._tree.size, LEAST_S)
        self._hang = (now, hang) if hang else self._hang
        if self._told and (hang is None or hang.key != self._told.key):
            if (
                self._group.leaving.failed is None and not mine.raised
            ):  # else this rank has given up, and none went on
                say(self._told.end)
            self._told = None
        run = own_run(os.environ, "logs")
        if hang and hang.seconds >= STUCK_S and run and (run / STOP).exists():
            say(f"rank {mine.rank} is ended by `samestep stop`, which no rank of a hung run hears")
            self.end_all(128 + signal.SIGTERM)
            self._group.leaving.end(128 + signal.SIGTERM)
        code = self._group.leaving.code
        if hang and code and hang.seconds >= GONE_S and mine.rank in {state.rank for state in hang.missing}:
            say(f"rank {mine.rank} is ended, for which others wait: it {mine.call}")
            self.end_all(code)
            self._group.leaving.end(code)
        if hang and not self._told and min(state.rank for state in hang.waiting) == mine.rank:
            self._told = hang
            say(hang.sentence(LEAST_S))

    def _state(self) -> RankState:
        group = self._group
        (phase, call), seconds = group.phase, time.monotonic() - group.phase_began
        thread = group.thread if group.thread.is_alive() else threading.main_thread()
        stack, now = frames_of_thread(thread.ident or 0), time.monotonic()
        frame, switches = users_frame(stack), -1
        with suppress(psutil.Error):  # the thread has just ended
            switches = sum(psutil.Process(thread.native_id).num_ctx_switches())
        if switches != self._quiet[0]:
            self._quiet = switches, now
        quiet_s = now - self._quiet[1]
        if (
            phase not in WAITS
            and quiet_s > _WORTH_TELLING_S
            and (wait := torchs_wait(stack, thread.native_id or 0))
        ):
            # a wait that the script made through torch, which the group has not counted
            return RankState(self._tree.number, -1, "call", wait, group.waits + 1, quiet_s, raised=_raised())
        line = frame.place if frame else ""
        state = RankState(
            self._tree.number, -1, phase, call, group.waits, seconds, line=line, raised=_raised()
        )
        return state._replace(does=frame.doing) if frame else state

    def _silent(self, known: Sequence[RankState], seconds: float) -> list[RankState]:
        """Neighbours that send nothing, not even of ranks behind them, while all others wait in the same call."""
        known = [state for state in known if state.does != _SILENT]
        waits = {state.waits for state in known if state.waits_now and state.seconds >= LEAST_S}
        if len(waits) != 1 or not all(state.waits_now and state.waits in waits for state in known):
            return []
        silent = self._tree.silent_neighbours(seconds)
        return [RankState(rank, -1, "other", "", -1, 0.0, does=_SILENT) for rank in silent]


def keep_pulse(pulse: Pulse, closed: threading.Event) -> None:
    """Write what the script raises or handles, and the threads' stacks when they are asked for: a thread's loop."""
    pulse.note_raised("")
    asked = pulse.asked
    while not closed.wait(_ANSWER_S):
        pulse.note_raised(_raised())
        if (now := pulse.asked) != asked and pulse.stacks is not None:
            asked = now
            # it holds the GIL, so that no thread's frames change meanwhile
            faulthandler.dump_traceback(pulse.stacks)


def _raised() -> str:
    """The exception that the script's main thread handles or ends with, such as in `finally`, and its line."""
    error = handled_by_thread(threading.main_thread().ident or 0) or getattr(sys, "last_value", None)
    if error is None or isinstance(error, GeneratorExit | StopIteration):
        return ""
    failure = recorded_traceback(failure_of(error, 1))
    said = failure.exception[0][:_MOST_SAID] if failure.exception else type(error).__name__
    return f"{said} ({failure.frame.place})" if failure.frame else said


def _news_from(said: Any) -> RankState | int:
    """Another rank's message: its state, or the exit code with which all ranks have to end."""
    return int(said[1]) if said[0] == _ENDS else as_kind(RankState, said)
