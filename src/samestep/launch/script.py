"""A script on N processes of this machine: from the command line's wishes to the run's exit code."""

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from samestep.launch.devices import share_cores
from samestep.launch.ending import ending, pulse_step, restarting
from samestep.launch.failure import exit_code
from samestep.launch.memory import watch_kills
from samestep.launch.output import Log, Terminal
from samestep.launch.port import hold_port
from samestep.launch.signals import PASSED_ON, Signals
from samestep.launch.supervise import Gang, Outcome
from samestep.launch.worker import Guardian, Order, fill_standard_descriptors
from samestep.placement import Placement, exports
from samestep.rundir import create_run, log_path, pulse_path, write_record

_SAME_PLACE_S = 10


@dataclass(frozen=True)
class Script:
    """What is to be run, and how."""

    name: str
    command: Sequence[str]
    size: int
    shown: frozenset[int] = frozenset({0})
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
    began = time.time()
    fill_standard_descriptors()
    run = create_run(script.run_dir, os.environ, _started(script, began))
    terminal, kills = Terminal(), watch_kills()
    restarts = 0
    previous: object = None
    with Signals(script.signals) as signals, Guardian() as guardian:
        while True:
            started = time.monotonic()
            outcome, gang = _attempt(script, run, restarts, guardian, terminal, signals)
            place = _place(run, outcome, time.monotonic() - started)
            if restarts == script.max_restarts or not _wants_restart(script, outcome):
                break
            if place is not None and place == previous:
                terminal.say("the same failure in the same place twice: not restarted again")
                break
            restarts, previous = restarts + 1, place
            step = pulse_step(run, outcome.cause.rank) if outcome.cause else None
            terminal.say(restarting(outcome, restarts, script.max_restarts, step))
    seconds = time.time() - began
    text = ending(script.name, run, outcome, gang.workers, script.shown, seconds, kills)
    code = 128 + signal.SIGINT if outcome.asked == signal.SIGINT else exit_code(outcome.status)
    record: dict[str, object] = {
        "exit_code": code,
        "seconds": round(seconds, 3),
        "restarts": restarts,
        "failure": text,
    }
    record["statuses"] = [worker.status for worker in gang.workers]
    try:
        write_record(run / "result.json", record)
    except OSError as error:
        terminal.say(f"result.json in {run} cannot be written ({(error.strerror or '').lower()})")
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


def _attempt(
    script: Script, run: Path, restarts: int, guardian: Guardian, terminal: Terminal, signals: Signals
) -> tuple[Outcome, Gang]:
    held, port = (nullcontext(), script.port) if script.port else hold_port()
    shares, threads = share_cores(script.size)
    told = {
        "TORCHELASTIC_RUN_ID": run.name,
        **script.env,
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(script.max_restarts),
        "SAMESTEP_RUN": str(run),
    }

    def lost(reason: str) -> None:
        terminal.say(f"logs in {run} cannot be written any more ({reason}); the run goes on")

    marked = script.shown != {0}
    orders = []
    for rank in range(script.size):
        pulse_path(run, rank).unlink(missing_ok=True)
        orders.append(
            Order(
                rank,
                script.command,
                worker_env(local_placement(rank, script.size, script.address, port), threads, told),
                shares[rank],
                0 if rank == 0 else None,
                Log(log_path(run, rank), lost),
                terminal if rank in script.shown else None,
                (f"[rank {rank}] ".encode() if rank else b"") if marked else None,
            )
        )
    try:
        with held:
            gang = Gang(orders, guardian, terminal, script.patience_s)
            return gang.watch(signals.fd), gang
    finally:
        for order in orders:
            order.log.close()


def _wants_restart(script: Script, outcome: Outcome) -> bool:
    if outcome.asked is not None or outcome.status == 0:
        return False
    return not script.restart_on or exit_code(outcome.status) in script.restart_on


def _place(run: Path, outcome: Outcome, seconds: float) -> object:
    """What says that two failures are one: the traceback and the step, or where none was told, about when."""
    if outcome.cause is None or outcome.traceback is None:
        return None
    step = pulse_step(run, outcome.cause.rank)
    return outcome.traceback, step, None if step is not None else int(seconds) // _SAME_PLACE_S


def _started(script: Script, began: float) -> dict[str, object]:
    return {
        "argv": list(script.command),
        "size": script.size,
        "host": os.uname().nodename,
        "pid": os.getpid(),
        "started": began,
        "cwd": os.getcwd(),
        "versions": {"python": sys.version.split()[0]},
    }
