"""Runs a script on N processes of this machine, with restarts, from the options to the run's exit code."""

import os
import re
import signal
import time
from collections.abc import Container, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import count
from pathlib import Path

import psutil

from samestep import rundir
from samestep.errors import RankMissing, UsageError
from samestep.files import unnamed_file
from samestep.placement.devices import CUBLAS, FIXED_CUBLAS, share_cores
from samestep.placement.place import Placement, exports
from samestep.rendezvous.key import DESCRIPTOR, key_file
from samestep.rendezvous.listen import hold_port
from samestep.start.ending import ending, step_of, summary_of
from samestep.start.fork import Warm
from samestep.start.memory import check_room, kills_for_memory
from samestep.start.nodes import End, Launchers, NodeMeeting, Past
from samestep.start.output import Log, Terminal
from samestep.start.python import scripts_python
from samestep.start.scan import names_early_variable
from samestep.start.signals import PASSED_ON, StopRequested, ending_signals, signals_as_bytes
from samestep.start.supervise import GRACE_S, Outcome, WorkerGroup
from samestep.start.watch import Watch
from samestep.start.worker import Guardian, WorkerSpec, fill_standard_descriptors
from samestep.steptimes import read_step_times
from samestep.text import counted, reason_of
from samestep.tracebacks import exit_code

_SAME_PLACE_S = 10  # without steps, failures within the same ten seconds are at the same place


@dataclass(frozen=True)
class Script:
    """The command to run, and how to run it."""

    name: str
    command: Sequence[str]
    size: int
    shown: Container[int] = frozenset({0})
    where: NodeMeeting | None = None
    run_dir: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    address: str = "127.0.0.1"
    port: int | None = None
    restart_on: frozenset[int] = frozenset()
    max_restarts: int = 0
    fork: bool | None = None  # None: only for restarts
    patience_s: float | None = None
    hang_timeout_s: float | None = None
    signals: tuple[signal.Signals, ...] = PASSED_ON

    @property
    def is_warmable(self) -> bool:
        """Whether its ranks can and should be forked from a process that has already imported torch."""
        target = self.command[1] if self.command[0] == scripts_python() else ""
        if self.fork is None and (not self.max_restarts or names_early_variable(Path(target))):
            return False
        return self.fork is not False and (target == "-m" or target.endswith(".py"))


def run_script(script: Script) -> int:
    """Run the script, print how it ended, and return the exit code; OSError if it cannot be executed."""
    if path := next((word for word in script.command if word.endswith(".py")), None):
        check_room(script.size, Path(path))
    fill_standard_descriptors()
    with ExitStack() as stack:
        return _Run(script, stack).code()


class _Run:
    """One run of a script, including its restarts."""

    def __init__(self, script: Script, stack: ExitStack) -> None:
        self._script, self._began, self._began_monotonic = script, time.time(), time.monotonic()
        self._launchers = stack.enter_context(closing(Launchers(script.where)))
        self._directory = _directory(script, self._launchers, self._began)
        self._terminal = Terminal()
        if advice := rundir.scratch_advice(self._directory, os.environ):
            self._terminal.say(f"samestep: {advice}")
        if self._terminal.is_live and os.environ.get("SAMESTEP_METER") != "0":
            self._terminal.progress = partial(_progress, self._directory)
        self._signals = stack.enter_context(signals_as_bytes({*script.signals, signal.SIGTSTP}))
        self._guardian = stack.enter_context(Guardian())
        self._shares, self._threads = share_cores(script.size, {**os.environ, **script.env})
        self._restarts = Restarts(script.max_restarts, script.restart_on)
        # memory for rank 0's state; it lives as long as this process, so it survives restarts
        self._slots: dict[str, int] = {}
        for name in rundir.SLOTS if script.max_restarts else ():
            self._slots[name] = stack.enter_context(unnamed_file(name=rundir.SLOTS[0])).fileno()
        self._named = set[psutil.Process]()  # that live on after a start
        self._warm: Warm | None = None
        if script.is_warmable:
            # forked processes recognise themselves as ranks by these, even if the script removes its own variables
            of_ranks = {"RANK": "0", "WORLD_SIZE": str(script.size)}
            env = {**defaults(self._threads), **os.environ, **script.env, **of_ranks}
            errors, target = self._directory / "logs" / "warm.log", script.command[1]
            folder = os.getcwd() if target == "-m" else os.path.dirname(os.path.realpath(target))
            self._warm = Warm([folder], env, script.size, errors, self._guardian)
            stack.enter_context(closing(self._warm))
            if script.fork:
                self._warm.wait(self._signals)

    def code(self) -> int:
        node, end, group = self._attempt()
        while (text := self._restarts.are_over(end)) is None:
            used, limit = self._restarts.past.used, self._script.max_restarts
            self._terminal.say(f"{end.summary}: restart {used} of {limit}")
            number = group.late_stop_signal
            if number is not None and not self._has_state:
                return self._finish(node, end._replace(code=128 + number), end.text or "", group)
            try:
                if self._launchers.lost:
                    self._go_on_without()
                node, end, group = self._attempt(number)
            except StopRequested as request:
                return self._finish(node, end._replace(code=128 + request.number), end.text or "", group)
            except RankMissing as error:
                return self._finish(node, end, str(error), group)
            except (UsageError, OSError) as error:
                return self._finish(node, end, f"{end.text}\n\nIt cannot be started again: {error}", group)
        return self._finish(node, end, text, group)

    @property
    def _has_state(self) -> bool:
        """Whether a Checkpoint has put a state into this process's memory."""
        return any(os.fstat(slot).st_size for slot in self._slots.values())

    def _go_on_without(self) -> None:
        """Find the other nodes again after one was lost; a signal ends the wait for them."""
        self._terminal.flush()
        with ending_signals():
            self._launchers.meet_again()
            self._directory = _directory(self._script, self._launchers, self._began, self._directory)
        self._terminal.say(f"samestep: going on with {counted(self._launchers.nodes, 'node')}")

    def _attempt(self, stop_signal: int | None = None) -> tuple[int, End, WorkerGroup]:
        """Start all ranks and wait for their end; returns the node of the cause, that node's End, and the workers."""
        script, run, launchers, kills = self._script, self._directory, self._launchers, kills_for_memory()
        with ExitStack() as stack:
            specs, total = self._specs(stack)
            elsewhere = launchers.should_stop if launchers.nodes > 1 else None
            # in a Slurm step all launchers share one terminal, so only node 0 reports
            say = self._terminal.say if launchers.node == 0 else str
            is_again = self._restarts.past.generation > 0 and self._has_state
            limit_s, share = script.hang_timeout_s, launchers.share
            watch = Watch(run, total, say, limit_s, share, is_again=is_again)
            watch.named = self._named
            stack.enter_context(closing(watch))
            if stop_signal is not None:
                watch.ask_to_stop(stop_signal)  # this start commits the state in memory, and ends
            group = WorkerGroup(
                specs,
                self._guardian,
                self._terminal,
                script.patience_s,
                signals=self._signals,
                is_over_elsewhere=elsewhere,
                watch=watch,
                warm=self._warm,
                # a restart continues from a commit, so work that the ranks still do is lost anyway
                grace_s=0.0 if script.max_restarts else GRACE_S,
                stop_signal=stop_signal,
            )
            outcome = group.watch()
        seconds = time.monotonic() - self._began_monotonic
        text = ending(script.name, run, outcome, group.workers, script.shown, seconds, kills, total)
        node, end = launchers.end(_end(run, outcome, group, text))
        return node, end, group

    def _finish(self, node: int, end: End, text: str, group: WorkerGroup) -> int:
        """Write the result to the run's directory and print it."""
        code = 128 + signal.SIGINT if end.stop_signal == signal.SIGINT else end.code
        record = {
            "exit_code": code,
            "seconds": round(time.monotonic() - self._began_monotonic, 3),
            "restarts": self._restarts.past.generation,
            "failure": text or None,
            "statuses": [worker.status for worker in group.workers],
        }
        here = self._launchers.node
        if node != here and text:
            host = os.uname().nodename
            text = f"{self._script.name} was stopped on node {here} ({host}): {text.splitlines()[0]}"
        name = f"result-node-{here}.json" if here else rundir.RESULT
        try:
            rundir.write_record(self._directory / name, record)
        except OSError as error:
            self._terminal.say(f"{rundir.RESULT} in {self._directory} cannot be written ({reason_of(error)})")
        if text:
            self._terminal.say(text)
        self._terminal.flush()
        if self._terminal.lost:
            self._terminal.say(f"samestep: {self._terminal.lost}; it is in {self._directory}/logs")
            self._terminal.flush()
        return code or int(bool(self._terminal.lost))

    def _specs(self, stack: ExitStack) -> tuple[list[WorkerSpec], int]:
        """What to start on this node in an attempt, and the number of ranks on all nodes."""
        script, run, port = self._script, self._directory, self._script.port
        if port is None:
            held, port = hold_port()
            stack.enter_context(held)
        try:
            ranks, pasts = self._launchers.begin(script.size, script.address, port, self._restarts.past)
        except RankMissing:
            if not script.max_restarts:
                raise
            self._go_on_without()  # a node was lost before its ranks had started
            return self._specs(stack)
        self._restarts.agree(pasts)
        key = {DESCRIPTOR: stack.enter_context(key_file(self._launchers.key, ranks.total))}
        variables = {
            "TORCHELASTIC_RUN_ID": self._launchers.run_name,
            **script.env,
            "TORCHELASTIC_RESTART_COUNT": str(self._restarts.past.generation),
            "TORCHELASTIC_MAX_RESTARTS": str(script.max_restarts),
            "SAMESTEP_RUN": str(run),
        }

        @cache  # once for all ranks
        def warn_log_lost(reason: str) -> None:
            self._terminal.say(f"logs in {run} cannot be written any more ({reason}); the run goes on")

        for local_rank in range(script.size):
            _forget(run, ranks.first + local_rank)
        # also files of an earlier start with more ranks, on a node that has been lost since
        for rank in count(ranks.total) if ranks.node == 0 else ():
            if not _forget(run, rank):
                break
        specs = []
        for local_rank, cores in enumerate(self._shares):
            place = ranks.place(local_rank, script.size)
            rank = place.rank
            specs.append(
                WorkerSpec(
                    rank,
                    script.command,
                    worker_env(place, self._threads, variables),
                    cores,
                    0 if rank == 0 else None,
                    stack.enter_context(closing(Log(rundir.log_path(run, rank), warn_log_lost))),
                    self._terminal if rank in script.shown else None,
                    None if script.shown == {0} else f"[rank {rank}] ".encode() if rank else b"",
                    rundir.failure_path(run, rank),
                    key | self._slots if rank == 0 else key,
                )
            )
        return specs, ranks.total


class Restarts:
    """Decides about restarts: not after the same failure twice; progress beyond the furthest step resets the count."""

    def __init__(self, most: int, codes: Container[int]) -> None:
        """At most `most` restarts without progress; `codes` are the exit codes to restart after, empty for any."""
        self._most, self._codes = most, codes
        self._failures: dict[str, str] = {}
        self.past = Past()

    def agree(self, pasts: Sequence[Past]) -> None:
        """Take over the counts of all nodes' launchers; a launcher that replaces a lost node starts without them."""
        furthest, used = max((past.furthest, past.used) for past in pasts)
        self.past = Past(max(past.generation for past in pasts), used, furthest)

    def are_over(self, end: End) -> str | None:
        """The report with which the run ends after this attempt; None to restart."""
        report = end.text or ""
        if end.stop_signal is not None or end.code == 0:
            return report
        if self._codes and end.code not in self._codes:
            return report
        generation, used, furthest = self.past
        if end.step > furthest:
            used, furthest = 0, end.step
        if used == self._most:
            return report
        if end.place in self._failures:
            again = "The same failure came again at the same place, so the run is not restarted:"
            return f"{self._failures[end.place]}\n\n{again}\n\n{report}"
        if end.place is not None:
            self._failures[end.place] = report
        self.past = Past(generation + 1, used + 1, furthest)
        return None


def _forget(run: Path, rank: int) -> bool:
    """Remove the files of a rank of an earlier start; returns whether there were any."""
    removed = False
    for path_of in (rundir.pulse_path, rundir.failure_path, rundir.stack_path):
        with suppress(OSError):  # as on a disk that cannot be written any more
            path_of(run, rank).unlink()
            removed = True
    return removed


def worker_env(place: Placement, threads: int, given: Mapping[str, str]) -> dict[str, str]:
    """A worker's environment. The placement comes first, then `given`, the user's variables, and the defaults."""
    env = {**defaults(threads), **os.environ, **given, **exports(place, given)}
    # An outer torchrun sets it; with it rank 0 would connect to a store instead of opening its own.
    env.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    return env


def defaults(threads: int) -> dict[str, str]:
    """Variables of a worker that the user can override."""
    # The hash seed decides the order of a set of strings, such as labels; it must be the same on all ranks.
    python = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", "PYTHONHASHSEED": "0"}
    return {**python, "OMP_NUM_THREADS": str(threads), CUBLAS: FIXED_CUBLAS[0]}


def _directory(script: Script, launchers: Launchers, began: float, known: Path | None = None) -> Path:
    """Node 0 makes the run's directory; another node makes its own only if it does not see node 0's."""
    try:
        started = rundir.start_record(script.command, script.size, began)
    except FileNotFoundError as error:
        raise UsageError(
            "the directory this was started in was removed; change to one that exists"
        ) from error
    if launchers.nodes > 1:
        started["nodes"] = launchers.nodes
    own = None if launchers.node else known or rundir.create_run(script.run_dir, os.environ, started)
    return launchers.agree_on_run(own) or known or rundir.create_run(script.run_dir, os.environ, started)


def _progress(run: Path) -> str:
    times = read_step_times(rundir.step_times_path(run, 0))
    return str(times.progress) if times and times.progress.rows else ""


def _end(run: Path, outcome: Outcome, group: WorkerGroup, text: str | None) -> End:
    """How an attempt ended on this node; code 0 if its workers were only stopped because another node failed."""
    code, stop_signal = exit_code(outcome.status), outcome.stop_signal
    stop_requested = any(os.path.exists(run / name) for name in (rundir.STOP, rundir.TIME_UP))
    if stop_signal is None and code == rundir.CHECKPOINTED and stop_requested:
        stop_signal = signal.SIGTERM
    ends = [worker.ended_at for worker in group.workers if worker.status and not worker.was_stopped]
    is_own = outcome.cause is not None or outcome.stop_signal is not None or bool(ends)
    is_echo = outcome.traceback is not None and outcome.traceback.is_echo
    steps = [step for worker in group.workers if (step := step_of(run, worker.rank)) is not None]
    place, at = _place(run, outcome, text, group), min(ends, default=time.monotonic())
    summary = summary_of(outcome, run)
    return End(code if is_own else 0, text, place, stop_signal, is_echo, at, max(steps, default=-1), summary)


def _place(run: Path, outcome: Outcome, text: str | None, group: WorkerGroup) -> str | None:
    """Equal for two failures that are the same: the failure and its step, or without steps the rough time."""
    if outcome.cause is None:
        return None
    step, failure = step_of(run, outcome.cause.rank), repr(outcome.traceback or outcome.status)
    is_from_outside = outcome.status == -signal.SIGKILL and "out of memory" not in (text or "")
    if is_from_outside or (outcome.traceback is None and step is None):
        return None
    seconds = time.monotonic() - group.began
    failure_without_times = re.sub(r"waited [\d.]+ (s|min \d+ s|h \d+ min)", "waited", failure)
    return repr((failure_without_times, step, None if step is not None else int(seconds) // _SAME_PLACE_S))
