"""A script on N processes of this machine: from the command line's wishes to the run's exit code."""

import os
import signal
import time
from collections.abc import Container, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from samestep.errors import UsageError
from samestep.placement.place import Placement, exports
from samestep.rendezvous.listen import hold_port
from samestep.rundir import (
    CHECKPOINTED,
    better_place,
    create_run,
    failure_path,
    log_path,
    pulse_path,
    start_record,
    stop_path,
    time_up_path,
    write_record,
)
from samestep.start.devices import share_cores
from samestep.start.ending import ending, pulse_step, restarting
from samestep.start.failure import exit_code
from samestep.start.memory import watch_kills
from samestep.start.nodes import Launchers, NodeMeeting, NodeRanks, Verdict
from samestep.start.output import Log, Terminal
from samestep.start.signals import PASSED_ON, Signals
from samestep.start.supervise import Outcome, WorkerGroup
from samestep.start.worker import Guardian, WorkerSpec, fill_standard_descriptors
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
    signals: tuple[signal.Signals, ...] = PASSED_ON


def run_script(script: Script) -> int:
    """Run it, say how it ended, and give the exit code; OSError where it cannot be executed."""
    fill_standard_descriptors()
    began = time.time()
    with ExitStack() as stack:
        launchers = stack.enter_context(closing(Launchers(script.where))) if script.where else None
        run = _directory(script, launchers, began)
        terminal, kills = Terminal(), watch_kills()
        if advice := better_place(run, os.environ):
            terminal.say(f"samestep: {advice}")
        signals, guardian = stack.enter_context(Signals(script.signals)), stack.enter_context(Guardian())
        restarts = 0
        previous: str | None = None
        while True:
            outcome, group, share = _attempt(script, run, restarts, guardian, terminal, signals, launchers)
            seconds = time.time() - began
            text = ending(script.name, run, outcome, group.workers, script.shown, seconds, kills, share.total)
            verdict = _verdict(script, run, outcome, group, text, launchers)
            if restarts == script.max_restarts or not _wants_restart(script, verdict):
                break
            if verdict.place is not None and verdict.place == previous:
                terminal.say("the same failure in the same place twice: not restarted again")
                break
            restarts, previous = restarts + 1, verdict.place
            step = pulse_step(run, outcome.cause.rank) if outcome.cause else None
            terminal.say(restarting(outcome, restarts, script.max_restarts, step))
    text = verdict.text
    if verdict.node != share.node and text:
        text = (
            f"{script.name} was stopped on node {share.node} ({os.uname().nodename}): {text.splitlines()[0]}"
        )
    code = 128 + signal.SIGINT if verdict.asked == signal.SIGINT else verdict.code
    record: dict[str, object] = {
        "exit_code": code,
        "seconds": round(seconds, 3),
        "restarts": restarts,
        "failure": verdict.text,
    }
    record["statuses"] = [worker.status for worker in group.workers]
    try:
        write_record(run / ("result.json" if share.node == 0 else f"result-node-{share.node}.json"), record)
    except OSError as error:
        terminal.say(f"result.json in {run} cannot be written ({reason_of(error)})")
    if text:
        terminal.say(text)
    terminal.flush()
    return code


def worker_env(place: Placement, threads: int, told: Mapping[str, str]) -> dict[str, str]:
    """What a worker finds: what it is told, then what the user set, then defaults."""
    defaults = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", "OMP_NUM_THREADS": str(threads)}
    env = {**defaults, **os.environ, **told, **exports(place, told)}
    # Set by a torchrun around this; it would have rank 0 dial a store instead of opening one.
    env.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    return env


def local_placement(rank: int, size: int, address: str, port: int) -> Placement:
    """A rank among processes of this one machine."""
    return Placement(rank, size, rank, size, 0, 1, "samestep", address, port)


def _directory(script: Script, launchers: Launchers | None, began: float) -> Path:
    """Node 0 makes the run's directory; another node makes one of its own only where it does not see that."""
    try:
        started = start_record(script.command, script.size, began)
    except FileNotFoundError as error:
        raise UsageError(
            "the directory this was started in was removed; change to one that exists"
        ) from error
    if launchers is None:
        return create_run(script.run_dir, os.environ, started)
    started["nodes"] = launchers.nodes
    own = create_run(script.run_dir, os.environ, started) if launchers.node == 0 else None
    return launchers.agree_on_run(own) or create_run(script.run_dir, os.environ, started)


def _attempt(
    script: Script,
    run: Path,
    restarts: int,
    guardian: Guardian,
    terminal: Terminal,
    signals: Signals,
    launchers: Launchers | None,
) -> tuple[Outcome, WorkerGroup, NodeRanks]:
    held, port = (nullcontext(), script.port) if script.port else hold_port()
    share = (
        launchers.begin(script.size, port)
        if launchers
        else NodeRanks(0, script.size, 0, 1, script.address, port)
    )
    shares, threads = share_cores(script.size)
    told = {
        "TORCHELASTIC_RUN_ID": launchers.run_name if launchers else run.name,
        **script.env,
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(script.max_restarts),
        "SAMESTEP_RUN": str(run),
    }

    def lost(reason: str) -> None:
        terminal.say(f"logs in {run} cannot be written any more ({reason}); the run goes on")

    marked = script.shown != {0}
    specs = []
    for local_rank in range(script.size):
        place = _place(share, local_rank, script.size)
        rank = place.rank
        for path in (pulse_path(run, rank), failure_path(run, rank)):
            path.unlink(missing_ok=True)
        specs.append(
            WorkerSpec(
                rank,
                script.command,
                worker_env(place, threads, told),
                shares[local_rank],
                0 if rank == 0 else None,
                Log(log_path(run, rank), lost),
                terminal if rank in script.shown else None,
                (f"[rank {rank}] ".encode() if rank else b"") if marked else None,
                failure_path(run, rank),
            )
        )
    try:
        with held:
            group = WorkerGroup(specs, guardian, terminal, script.patience_s)
            return group.watch(signals.fd, launchers.should_stop if launchers else None), group, share
    finally:
        for spec in specs:
            spec.log.close()


def _place(share: NodeRanks, local_rank: int, local_size: int) -> Placement:
    rank = share.first + local_rank
    at = (share.node, share.nodes, "samestep", share.address, share.port)
    return Placement(rank, share.total, local_rank, local_size, *at)


def _verdict(
    script: Script,
    run: Path,
    outcome: Outcome,
    group: WorkerGroup,
    text: str | None,
    launchers: Launchers | None,
) -> Verdict:
    code, spot = exit_code(outcome.status), _spot(run, outcome, group)
    asked = outcome.asked
    if asked is None and code == CHECKPOINTED and (stop_path(run).exists() or time_up_path(run).exists()):
        asked = signal.SIGTERM
    if launchers is None:
        return Verdict(0, code, text, spot, asked)
    ends = [worker.ended_at for worker in group.workers if worker.status and not worker.was_stopped]
    return launchers.end(
        code,
        text,
        echo=bool(outcome.traceback and outcome.traceback.is_echo),
        own=outcome.cause is not None or outcome.asked is not None or bool(ends),
        asked=asked,
        at=min(ends, default=time.monotonic()),
        place=spot,
    )


def _wants_restart(script: Script, verdict: Verdict) -> bool:
    if verdict.asked is not None or verdict.code == 0 or verdict.node < 0:
        return False
    return not script.restart_on or verdict.code in script.restart_on


def _spot(run: Path, outcome: Outcome, group: WorkerGroup) -> str | None:
    """What says that two failures are one: the traceback and the step, or where none was told, about when."""
    if outcome.cause is None or outcome.traceback is None:
        return None
    step = pulse_step(run, outcome.cause.rank)
    seconds = time.monotonic() - group.began
    return repr((outcome.traceback, step, None if step is not None else int(seconds) // _SAME_PLACE_S))
