"""A script on N processes of this machine: from the command line's wishes to the run's exit code."""

import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from samestep.errors import UsageError
from samestep.launch.devices import share_cores
from samestep.launch.failure import describe_end, duration, exit_code, name_ranks, render
from samestep.launch.output import Log, Terminal
from samestep.launch.port import hold_port
from samestep.launch.signals import Signals
from samestep.launch.supervise import Gang, Outcome
from samestep.launch.worker import CHECKPOINTED, Guardian, Order, Worker
from samestep.placement import Placement, exports
from samestep.rundir import create_run, log_path, pulse_path, read_pulse, write_record


@dataclass(frozen=True)
class Script:
    """What is to be run, and how."""

    name: str
    command: Sequence[str]
    size: int
    shown: frozenset[int] = frozenset({0})
    marked: bool = False
    run_dir: str | None = None
    log_dir: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    restart_on: frozenset[int] = frozenset()
    max_restarts: int = 0
    patience_s: float | None = None


def run_script(script: Script) -> int:
    """Run it, say how it ended, and give the exit code."""
    began = time.time()
    run = create_run(script.run_dir, os.environ)
    write_record(run / "run.json", _started(script, began))
    terminal = Terminal()
    guardian = Guardian()
    try:
        with Signals() as signals:
            outcome, gang = _attempt(script, run, guardian, terminal, signals)
    finally:
        guardian.close()
    text = _ending(script, run, outcome, gang, time.time() - began)
    code = _code(outcome)
    write_record(
        run / "result.json", {"exit_code": code, "seconds": round(time.time() - began, 3), "failure": text}
    )
    terminal.flush()
    if text:
        print(text, file=sys.stderr, flush=True)
    return code


def worker_env(rank: int, size: int, port: int, threads: int, told: Mapping[str, str]) -> dict[str, str]:
    """What a worker of this machine finds in its environment; `told` wins over what the launcher found in its own."""
    place = Placement(rank, size, rank, size, 0, 1, "samestep", "127.0.0.1", port)
    own = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", "OMP_NUM_THREADS": str(threads)}
    return {**own, **os.environ, **told, **exports(place, told)}


def _attempt(
    script: Script, run: Path, guardian: Guardian, terminal: Terminal, signals: Signals
) -> tuple[Outcome, Gang]:
    held, port = hold_port()
    shares, threads = share_cores(script.size)
    told = {**script.env, "TORCHELASTIC_RUN_ID": run.name, "SAMESTEP_RUN": str(run)}

    def lost(reason: str) -> None:
        terminal.say(f"logs in {run} cannot be written any more ({reason}); the run goes on")

    orders = [
        Order(
            rank,
            script.command,
            worker_env(rank, script.size, port, threads, told),
            shares[rank],
            0 if rank == 0 else None,
            Log(log_path(run, rank), lost),
            terminal if rank in script.shown else None,
            (f"[rank {rank}] ".encode() if rank else b"") if script.marked else None,
        )
        for rank in range(script.size)
    ]
    with held:
        gang = Gang(orders, guardian, terminal, script.patience_s)
        return gang.watch(signals.fd), gang


def _started(script: Script, began: float) -> dict[str, object]:
    return {
        "argv": list(script.command),
        "size": script.size,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": began,
        "cwd": str(Path.cwd()),
        "python": sys.version.split()[0],
    }


def _code(outcome: Outcome) -> int:
    return 130 if outcome.asked == 2 else exit_code(outcome.status)


def _ending(script: Script, run: Path, outcome: Outcome, gang: Gang, seconds: float) -> str | None:
    if outcome.cause is None:
        return None
    cause = outcome.cause
    pulse = read_pulse(pulse_path(run, cause.rank))
    where = socket.gethostname() + (f", {pulse.device}" if pulse else "")
    step = f", in step {pulse.step}" if pulse and pulse.step >= 0 else ""
    head = f"{script.name} failed on rank {cause.rank} of {script.size} ({where}) after {duration(seconds)}{step}"
    words = [] if outcome.traceback else [describe_end(outcome.status)]
    stopped = [worker.rank for worker in gang.workers if worker.was_stopped and worker is not cause]
    logs = f"Logs: {run}/logs/rank-{{0..{script.size - 1}}}.log"
    tail = (
        f"{name_ranks(stopped)} {'was' if len(stopped) == 1 else 'were'} stopped. {logs}" if stopped else logs
    )
    return render(head, outcome.traceback, words, tail)
