"""Runs a script on N processes of this machine: from the command line's options to the run's exit code."""

import os
import re
import signal
import time
from collections.abc import Container, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from samestep.errors import UsageError
from samestep.placement.devices import CUBLAS, FIXED_CUBLAS, share_cores
from samestep.placement.place import Placement, exports
from samestep.rendezvous.key import DESCRIPTOR, handed_on
from samestep.rendezvous.listen import hold_port
from samestep.rundir import (
    CHECKPOINTED,
    better_place,
    create_run,
    failure_path,
    log_path,
    pulse_path,
    stack_path,
    start_record,
    step_times_path,
    stop_path,
    time_up_path,
    write_record,
)
from samestep.start.ending import ending, restarting, step_of
from samestep.start.failure import exit_code
from samestep.start.memory import watch_kills
from samestep.start.nodes import End, Launchers, NodeMeeting
from samestep.start.output import Log, Terminal
from samestep.start.signals import PASSED_ON, signals_as_bytes
from samestep.start.supervise import Outcome, WorkerGroup
from samestep.start.watch import Watch
from samestep.start.worker import Guardian, WorkerSpec, fill_standard_descriptors
from samestep.steptimes import read_step_times
from samestep.text import reason_of

_SAME_PLACE_S = 10


@dataclass(frozen=True)
class Script:
    """What is to be run, and how."""

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
    patience_s: float | None = None
    hang_timeout_s: float | None = None
    signals: tuple[signal.Signals, ...] = PASSED_ON


def run_script(script: Script) -> int:
    """Run it, say how it ended, and give the exit code; OSError where it cannot be executed."""
    fill_standard_descriptors()
    began = time.time()
    with ExitStack() as stack:
        launchers = stack.enter_context(closing(Launchers(script.where)))
        run = _directory(script, launchers, began)
        terminal, kills = Terminal(), watch_kills()
        if advice := better_place(run, os.environ):
            terminal.say(f"samestep: {advice}")
        if terminal.is_live and os.environ.get("SAMESTEP_METER") != "0":
            terminal.progress = partial(_progress, run)
        signals = stack.enter_context(signals_as_bytes(script.signals))
        guardian = stack.enter_context(Guardian())
        restarts, previous = 0, None
        while True:
            with ExitStack() as attempt:
                specs, total = _specs(script, run, restarts, terminal, launchers, attempt)
                elsewhere = launchers.should_stop if launchers.nodes > 1 else None
                # in a Slurm step all launchers write to one place
                say = terminal.say if launchers.node == 0 else str
                watch = Watch(run, total, say, script.hang_timeout_s, launchers.share)
                group = WorkerGroup(specs, guardian, terminal, script.patience_s, signals, elsewhere, watch)
                outcome = group.watch()
            seconds = time.time() - began
            text = ending(script.name, run, outcome, group.workers, script.shown, seconds, kills, total)
            node, end = launchers.end(_end(run, outcome, group, text))
            if restarts == script.max_restarts or not _may_restart(script, node, end):
                break
            if end.place is not None and end.place == previous:
                terminal.say("the same failure in the same place twice: not restarted again")
                break
            restarts, previous = restarts + 1, end.place
            terminal.say(restarting(outcome, run, restarts, script.max_restarts))
    code = 128 + signal.SIGINT if end.asked == signal.SIGINT else end.code
    record = {
        "exit_code": code,
        "seconds": round(seconds, 3),
        "restarts": restarts,
        "failure": end.text,
        "statuses": [worker.status for worker in group.workers],
    }
    here, text = launchers.node, end.text
    if node != here and text:
        text = f"{script.name} was stopped on node {here} ({os.uname().nodename}): {text.splitlines()[0]}"
    try:
        write_record(run / (f"result-node-{here}.json" if here else "result.json"), record)
    except OSError as error:
        terminal.say(f"result.json in {run} cannot be written ({reason_of(error)})")
    if text:
        terminal.say(text)
    terminal.flush()
    return code


def worker_env(place: Placement, threads: int, told: Mapping[str, str]) -> dict[str, str]:
    """A worker's environment: the placement, what it is told, the user's variables, and defaults, in this order."""
    defaults = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", "OMP_NUM_THREADS": str(threads)}
    defaults |= {CUBLAS: FIXED_CUBLAS[0]}
    env = {**defaults, **os.environ, **told, **exports(place, told)}
    # Set by a torchrun around this; it would have rank 0 dial a store instead of opening one.
    env.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    return env


def _directory(script: Script, launchers: Launchers, began: float) -> Path:
    """Node 0 makes the run's directory; another node makes its own only where it does not see node 0's."""
    try:
        started = start_record(script.command, script.size, began)
    except FileNotFoundError as error:
        raise UsageError(
            "the directory this was started in was removed; change to one that exists"
        ) from error
    if launchers.nodes > 1:
        started["nodes"] = launchers.nodes
    own = None if launchers.node else create_run(script.run_dir, os.environ, started)
    return launchers.agree_on_run(own) or create_run(script.run_dir, os.environ, started)


def _specs(
    script: Script, run: Path, restarts: int, terminal: Terminal, launchers: Launchers, attempt: ExitStack
) -> tuple[list[WorkerSpec], int]:
    """The workers of this node in an attempt, and the number of ranks on all nodes."""
    port = script.port
    if port is None:
        held, port = hold_port()
        attempt.enter_context(held)
    ranks = launchers.begin(script.size, script.address, port)
    shares, threads = share_cores(script.size, {**os.environ, **script.env})
    key = attempt.enter_context(handed_on(launchers.key))
    told = {
        "TORCHELASTIC_RUN_ID": launchers.run_name,
        **script.env,
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(script.max_restarts),
        "SAMESTEP_RUN": str(run),
        DESCRIPTOR: str(key),
    }

    def lost(reason: str) -> None:
        terminal.say(f"logs in {run} cannot be written any more ({reason}); the run goes on")

    specs = []
    for local_rank, cores in enumerate(shares):
        place = ranks.place(local_rank, script.size)
        rank = place.rank
        for path in (pulse_path(run, rank), failure_path(run, rank), stack_path(run, rank)):
            path.unlink(missing_ok=True)
        specs.append(
            WorkerSpec(
                rank,
                script.command,
                worker_env(place, threads, told),
                cores,
                0 if rank == 0 else None,
                attempt.enter_context(closing(Log(log_path(run, rank), lost))),
                terminal if rank in script.shown else None,
                None if script.shown == {0} else f"[rank {rank}] ".encode() if rank else b"",
                failure_path(run, rank),
                key,
            )
        )
    return specs, ranks.total


def _progress(run: Path) -> str:
    found = read_step_times(step_times_path(run, 0))
    return str(found.progress) if found and found.progress.rows else ""


def _end(run: Path, outcome: Outcome, group: WorkerGroup, text: str | None) -> End:
    """How an attempt ended on this node; code 0 where its workers were stopped because another node failed."""
    code, asked = exit_code(outcome.status), outcome.asked
    if asked is None and code == CHECKPOINTED and (stop_path(run).exists() or time_up_path(run).exists()):
        asked = signal.SIGTERM
    ends = [worker.ended_at for worker in group.workers if worker.status and not worker.was_stopped]
    is_own = outcome.cause is not None or outcome.asked is not None or bool(ends)
    is_echo = outcome.traceback is not None and outcome.traceback.is_echo
    at = min(ends, default=time.monotonic())
    return End(code if is_own else 0, text, _spot(run, outcome, group), asked, is_echo, at)


def _may_restart(script: Script, node: int, end: End) -> bool:
    if end.asked is not None or end.code == 0 or node < 0:
        return False
    return not script.restart_on or end.code in script.restart_on


def _spot(run: Path, outcome: Outcome, group: WorkerGroup) -> str | None:
    """Equal for two failures that are the same: the traceback and the step, or without steps about when."""
    if outcome.cause is None or outcome.traceback is None:
        return None
    step = step_of(run, outcome.cause.rank)
    seconds = time.monotonic() - group.began
    found = re.sub(r"waited [\d.]+ (s|min \d+ s|h \d+ min)", "waited", repr(outcome.traceback))
    return repr((found, step, None if step is not None else int(seconds) // _SAME_PLACE_S))
