"""Writes a run's last lines: which rank failed, where, after how long, and how the other ranks ended."""

import os
import signal
from collections.abc import Container, Sequence
from pathlib import Path

from samestep.failure import heading, typed
from samestep.files import read_text
from samestep.rundir import CHECKPOINTED, STOP, PulseReading, pulse_path, read_pulse
from samestep.start.memory import explain_kill
from samestep.start.scan import as_module
from samestep.start.supervise import Outcome
from samestep.start.worker import Worker
from samestep.text import duration, name_ranks
from samestep.tracebacks import describe_end, last_words

_OF_PACKAGE = "ImportError: attempted relative import"
_TERMINATED = b"terminate called without an active exception"
_AT_ITS_END = (
    "the script had ended: torch aborted in a thread of its process group while Python ended; before the script ends,\n"
    "write `del model; gc.collect(); dist.barrier(); dist.destroy_process_group()`"
)


def ending(
    name: str,
    run: Path,
    outcome: Outcome,
    workers: Sequence[Worker],
    shown: Container[int],
    seconds: float,
    kills: int | None,
    size: int,
) -> str | None:
    """The last lines of a run; None if it succeeded."""
    logs = f"Logs: {typed(run)}/logs/rank-{_numbers(workers)}.log"
    logs = logs if (run / "logs").is_dir() else f"{typed(run)} was removed, and the logs in it."
    if outcome.cause is None:
        after = f"after {duration(seconds)}"
        if outcome.status == CHECKPOINTED:
            code = "" if outcome.stop_signal == signal.SIGINT else f"exit code {CHECKPOINTED}: "
            how = f"stopped at a checkpoint {after} ({code}run it again)."
        elif outcome.stop_signal is not None:
            asked = signal.Signals(outcome.stop_signal).name
            how = f"was stopped by {asked} {after}."
            if outcome.traceback:
                asked = "`samestep stop`" if (run / STOP).exists() and not read_text(run / STOP) else asked
                how = f"was stopped by {asked} {after}, in a hang: {'; '.join(outcome.traceback.exception)}."
            elif outcome.status == 0:  # by itself, or since the signal came at its end
                how = f"was asked to end by {asked}, and every rank came to the end of the script {after}."
        elif apart := _apart(workers):
            how = f"ended with exit code 0 {after}, although {apart}."
        else:
            return None
        return f"{name} {how} {logs}"
    cause = outcome.cause
    pulse, step = read_pulse(pulse_path(run, cause.rank)), step_of(run, cause.rank)
    where = os.uname().nodename + (f", {pulse.device}" if pulse else "")
    lines = _failure_lines(outcome, cause, cause.rank in shown, kills, pulse)
    if lines[-1:] and _OF_PACKAGE in lines[-1]:
        before, module = as_module(Path(name if name.endswith(".py") else f"{name.replace('.', os.sep)}.py"))
        lines.append(
            f"samestep: {name} belongs to a package; write `{before}samestep run -n {len(workers)} {module}`"
        )
    head, last = heading(name, cause.rank, size, where, seconds, step), f"{_others(cause, workers)}{logs}"
    return "\n".join([head, "", *lines, "", last])


def summary_of(outcome: Outcome, run: Path) -> str:
    """How an attempt ended, for the line between this attempt and the next."""
    if (cause := outcome.cause) is None:
        return f"exit code {outcome.status}"
    exception = outcome.traceback.exception if outcome.traceback else (describe_end(outcome.status),)
    remedies = [line.removeprefix("samestep: ") for line in exception[1:] if line.startswith("samestep: ")]
    what, step = "; ".join([exception[0], *remedies[:1]]), step_of(run, cause.rank)
    return f"rank {cause.rank} failed{'' if step is None else f' in step {step}'} ({what})"


def step_of(run: Path, rank: int) -> int | None:
    """The step that a worker last reported; None if it reported none."""
    pulse = read_pulse(pulse_path(run, rank))
    return pulse.step if pulse and pulse.step >= 0 else None


def _failure_lines(
    outcome: Outcome, cause: Worker, shown: bool, kills: int | None, pulse: PulseReading | None
) -> list[str]:
    lines = outcome.traceback.lines if outcome.traceback else []
    if outcome.status == -signal.SIGKILL:
        return [*lines, explain_kill(kills)]
    is_at_its_end = outcome.traceback is None or outcome.traceback.frame is None
    if outcome.status == -signal.SIGABRT and is_at_its_end and _TERMINATED in cause.err.tail:
        return [_AT_ITS_END, describe_end(outcome.status)]
    if any("killed by signal: Killed" in line for line in lines):
        return [*lines, explain_kill(kills).replace("killed by SIGKILL", "a loader worker was killed", 1)]
    if outcome.traceback is None:
        words = () if shown and not cause.err.hides else last_words(cause.err.tail.decode(errors="replace"))
        left = [f"rank {cause.rank} {pulse.call}"] if pulse and pulse.phase == "end" and pulse.call else []
        return [*words, *left, describe_end(outcome.status)]
    return lines if outcome.status == 1 else [*lines, describe_end(outcome.status)]


def _apart(workers: Sequence[Worker]) -> str:
    """What ranks printed that lost each other, where the script goes on after its exceptions."""
    printed = [(worker.rank, said) for worker in workers if (said := worker.traceback())]
    lost = [rank for rank, said in printed if said.is_echo]
    began = [(rank, said) for rank, said in printed if not said.is_echo]
    if not lost or not began:
        return ""
    rank, said = began[0]
    at = f" ({said.frame.place})" if said.frame else ""
    return f"{name_ranks(lost)} lost another rank: rank {rank} had printed {said.exception[0]}{at}"


def _others(cause: Worker, workers: Sequence[Worker]) -> str:
    others = [worker for worker in workers if worker is not cause]
    # a rank that lost its partner just before it was stopped has not failed by itself
    unfinished = [worker for worker in others if worker.status != 0]
    stopped = [worker.rank for worker in unfinished if worker.was_stopped or worker.is_echo]
    failed = [worker.rank for worker in others if worker.status and worker.rank not in stopped]
    done = [worker.rank for worker in others if worker.status == 0]
    was_stopped = "was stopped" if len(stopped) == 1 else "were stopped"
    groups = ((stopped, was_stopped), (failed, "failed too"), (done, "had finished"))
    parts = [f"{name_ranks(ranks)} {what}" for ranks, what in groups if ranks]
    return ", ".join(parts) + ". " if parts else ""


def _numbers(workers: Sequence[Worker]) -> str:
    first, last = workers[0].rank, workers[-1].rank
    return str(first) if first == last else f"{{{first}..{last}}}"
