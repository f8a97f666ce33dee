"""Reads runs from their files: what was started, the state, and what each rank does."""

import os
import re
import signal
import stat
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from samestep import files, rundir
from samestep.errors import UsageError
from samestep.failure import read_failure
from samestep.start.slurm import state_of_job
from samestep.steptimes import Progress, read_step_times
from samestep.text import name_ranks, printable
from samestep.tracebacks import recorded_traceback

_SILENT_S = 600.0
_CLOCK_SECONDS = 60.0
_END_OF_TIME = 2.0**37  # later years have five digits
_MOST_RANKS = 10_000_000
_MOST_LINES = 1000
_MOST_CHARACTERS = 2000
_ENDS = {0: "done", rundir.CHECKPOINTED: "stopped at a checkpoint", 124: "out of time", 130: "interrupted"}
_ENDS |= {128 + number: f"stopped by {number.name}" for number in (signal.SIGTERM, signal.SIGHUP)}
_JOB_ENDS = {"completed": "done", "timeout": "out of time", "node fail": "lost a node"}
_BY_SLURM = ("cancelled", "preempted", "out of time", "lost a node")  # where Slurm has killed the ranks
_GUESSED = "killed by SIGKILL, most likely"  # what tee.py records of a rank whose end nobody saw


class End(NamedTuple):
    code: int
    seconds: float | None
    failure: str | None


@dataclass(frozen=True)
class Run:
    """The content of a run's directory at one time; `ended` is None if there is no result."""

    path: Path
    argv: list[str]
    num_started: int  # ranks
    host: str
    pid: int
    started: float
    slurm_job: str
    ended: "End | None"
    pulses: dict[int, rundir.PulseReading]
    logs: tuple[int, ...]
    written: float

    @property
    def command(self) -> str:
        """The command without the interpreter, on a single line."""
        is_python = len(self.argv) > 1 and Path(self.argv[0]).name.startswith("python")
        text = " ".join(self.argv[1:] if is_python else self.argv)[:_MOST_CHARACTERS]
        return "".join(letter if letter.isprintable() else " " for letter in text)

    @cached_property
    def exit_code(self) -> int | None:
        """The code with which the run ended; rank 0's own may only say that it lost the rank that failed."""
        if self.ended is None or self.ended.code != 1 or self.ended.failure:
            return self.ended and self.ended.code
        recorded = self.recorded[0]
        return 1 if recorded is None else recorded

    @cached_property
    def state(self) -> str:
        if (code := self.exit_code) is not None:
            return _ENDS.get(code, f"failed ({code})")
        is_here = self.host == os.uname().nodename
        if is_here and _lives(self.pid, self.started):
            return "running"
        job = state_of_job(self.slurm_job)
        if job not in (None, "running"):
            return _JOB_ENDS.get(job, job)
        if is_here:
            return "ended without a result" if self.recorded[0] is None else f"failed ({self.recorded[0]})"
        beats = (pulse.unix for pulse in self.pulses.values())
        silent = time.time() - max([self.started, self.written, *beats])
        return "running" if silent < _SILENT_S else f"silent for {silent / 60:.0f} min"

    @cached_property
    def recorded(self) -> tuple[int | None, str]:
        """The code and report of the first rank that recorded a failure; no code if it only lost another rank."""
        found = []
        for rank, pulse in self.pulses.items():
            path = rundir.failure_path(self.path, rank)
            if (failure := read_failure(path, pulse.pid)) and (written := _look(path)):
                traceback = recorded_traceback(failure)
                lines = traceback.lines or [f"exit code {failure.code}"]
                place = f"{' in' * (pulse.phase != 'end')} {pulse.call}" if pulse.call else ""
                lines = [printable(line, _MOST_CHARACTERS) for line in (f"rank {rank}{place}", *lines)]
                found.append((traceback.is_echo, written.st_mtime, failure.code, "\n".join(lines)))
        echo, _, code, text = min(found, default=(True, 0.0, 1, ""))
        return None if echo else code, text

    @property
    def is_over(self) -> bool:
        """Whether it has certainly ended; a silent run on another machine may still be alive."""
        return self.state not in ("running", "pending") and not self.state.startswith("silent")

    @property
    def size(self) -> int:
        return len(self.logs) or self.num_started

    @property
    def seconds(self) -> float:
        """The time it ran, or has been running."""
        if self.ended and self.ended.seconds is not None:
            return self.ended.seconds
        last = max([self.started, *(pulse.unix for pulse in self.pulses.values())])
        return max(0.0, (last if self.is_over else time.time()) - self.started)  # a clock may be set back

    @property
    def step(self) -> int | None:
        return min((pulse.step for pulse in self.pulses.values() if pulse.step >= 0), default=None)

    @cached_property
    def progress(self) -> Progress:
        rank = min(self.pulses, default=0)
        times = read_step_times(rundir.step_times_path(self.path, rank))
        return times.progress if times else Progress()

    def facts(self) -> dict[str, Any]:
        """The facts for JSON; rates are those of training steps without the start-up."""
        step_s, failure = self.progress.step_s or None, self.ended and self.ended.failure
        if self.is_over and not failure and (self.ended is None or self.ended.code):
            failure = self.recorded[1] or None
        if self.ended is None and self.state in _BY_SLURM and failure and _GUESSED in failure:
            failure = None
        return {
            "run": str(self.path),
            "state": self.state,
            "command": self.command,
            "ranks": self.size,
            "host": self.host,
            "started": self.started,
            "seconds": round(self.seconds, 3),
            "step": self.step,
            "steps_per_second": step_s and round(1 / step_s, 3),
            "samples_per_second": round(self.progress.samples_per_second, 1) or None,
            "exit_code": self.exit_code,
            "failure": failure,
        }


def root_of(directory: str | None) -> Path:
    return Path(directory or os.environ.get("SAMESTEP_RUN_DIR") or "runs")


def read_run(path: Path) -> Run | None:
    """The run in a directory; None if it is no run of samestep: other programs write a run.json too."""
    record: Any = rundir.read_record(path / rundir.STARTED) or {}
    argv, size, started, pid = (record.get(name) for name in ("argv", "size", "started", "pid"))
    are_words = isinstance(argv, list) and all(isinstance(word, str) for word in argv)
    if not are_words or type(size) is not int or not _is_time(started) or not 0 < size < _MOST_RANKS:
        return None
    logs = tuple(sorted(_numbers(path / "logs", "rank-", ".log")))
    numbers = sorted(_numbers(path / "pulse", "rank-", ""))
    pulses = {rank: rundir.read_pulse(rundir.pulse_path(path, rank)) for rank in numbers}
    read = {rank: _plain(pulse) for rank, pulse in pulses.items() if pulse}
    outputs = [rundir.log_path(path, rank) for rank in logs] or [job_output(path)]
    written = max((status.st_mtime for path in outputs if (status := _look(path))), default=0.0)
    host, job = printable(record.get("host")), str(record.get("slurm_job") or "")
    ended = _ended(rundir.read_record(path / rundir.RESULT), path / rundir.EXIT_BYTE)
    pid = pid if type(pid) is int else 0
    return Run(path, argv, size, host, pid, started, job, ended, read, logs, written)


def job_output(run: Path) -> Path:
    return run.with_name(f"{run.name}.out")


def list_runs(root: Path) -> list[Run]:
    try:
        paths = [Path(entry.path) for entry in os.scandir(root) if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []
    runs = [run for path in paths if (run := read_run(path))]
    return sorted(runs, key=lambda run: (run.started, run.path.name), reverse=True)


def find_run(name: str | None) -> Run:
    """The run of a directory or of a name below ./runs; without a name, the newest run."""
    root = root_of(None)
    if name is None:
        if newest := list_runs(root)[:1]:
            return newest[0]
        raise UsageError(f"there is no run in {root}; name its directory, or set SAMESTEP_RUN_DIR")
    for path in (Path(name), root / name):
        if run := read_run(path):
            return run
    raise UsageError(f"there is no run in {name} or {root / name}; see `samestep runs`")


def log_of(run: Run, rank: int) -> Path:
    if not run.logs and _look(job_output(run.path)):
        return job_output(run.path)
    if rank not in run.logs:
        existing = name_ranks(run.logs) if run.logs else "no log yet"
        raise UsageError(f"rank {rank} has no log in {run.path}, which has {existing}; choose with --rank")
    return rundir.log_path(run.path, rank)


def _ended(record: dict[str, Any] | None, exit_byte: Path) -> End | None:
    """The content of result.json; code 1 if its exit code is invalid, and the file's if it is 0."""
    if record is None:
        return None
    code, seconds, failure = record.get("exit_code"), record.get("seconds"), record.get("failure")
    lines = failure.splitlines()[:_MOST_LINES] if isinstance(failure, str) else []
    text = "\n".join(printable(line, _MOST_CHARACTERS) for line in lines)
    exit_code = code if type(code) is int and abs(code) < 256 else 1
    with suppress(OSError):
        exit_code = exit_code or int.from_bytes(files.read_regular(exit_byte, 1))
    return End(exit_code, seconds if _is_time(seconds) else None, text or None)


def _plain(pulse: rundir.PulseReading) -> rundir.PulseReading:
    """A pulse with safe texts and times, whatever its file contains."""
    device, phase, call = (printable(text) for text in (pulse.device, pulse.phase, pulse.call))
    unix = pulse.unix if _is_time(pulse.unix) else 0.0
    return pulse._replace(device=device, phase=phase, call=call, unix=unix)


def _is_time(seconds: Any) -> bool:
    return type(seconds) in (int, float) and bool(0 <= seconds < _END_OF_TIME)


def _lives(pid: int, started: float) -> bool:
    """Whether the process that began a run lives; a later process may have the same number."""
    try:
        process = psutil.Process(pid)
        is_ended = process.status() == psutil.STATUS_ZOMBIE  # some containers keep it so for ever
        return bool(process.create_time() < started + _CLOCK_SECONDS) and not is_ended
    except (psutil.Error, ValueError, OverflowError):
        return False


def _look(path: Path) -> os.stat_result | None:
    """The status of a regular file; None if it is missing, a link, or something else."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status if stat.S_ISREG(status.st_mode) else None


def _numbers(folder: Path, before: str, after: str) -> list[int]:
    names = os.listdir(folder) if folder.is_dir() and not folder.is_symlink() else []
    matches = (re.fullmatch(f"{before}(0|[1-9][0-9]{{0,6}}){re.escape(after)}", name) for name in names)
    return [int(match[1]) for match in matches if match]
