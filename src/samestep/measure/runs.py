"""Reads from files alone what was run in a directory, its state, and what each rank does."""

import os
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil

from samestep.errors import UsageError
from samestep.rundir import PulseReading, log_path, pulse_path, read_pulse, read_record, step_times_path
from samestep.steptimes import Progress, read_step_times

_SILENT_S = 600.0
_ENDS = {0: "done", 75: "stopped at a checkpoint", 124: "out of time", 130: "interrupted"}


@dataclass(frozen=True)
class Run:
    """One run's directory, read once."""

    path: Path
    record: dict[str, Any]
    result: dict[str, Any] | None
    pulses: dict[int, PulseReading]
    logs: tuple[int, ...]
    written: float

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def command(self) -> str:
        """What was run, without the interpreter, on one line."""
        argv = [str(word) for word in self.record.get("argv", [])]
        is_python = len(argv) > 1 and Path(argv[0]).name.startswith("python")
        text = " ".join(argv[1:] if is_python else argv)
        return "".join(letter if letter.isprintable() else " " for letter in text)

    @property
    def state(self) -> str:
        if self.result:
            code = self.result.get("exit_code", 1)
            return _ENDS.get(code, f"failed ({code})")
        if self.record.get("host") == os.uname().nodename:
            pid = self.record.get("pid")
            return "running" if isinstance(pid, int) and psutil.pid_exists(pid) else "ended without a result"
        silent = time.time() - max([self.started, self.written, *(one.unix for one in self.pulses.values())])
        return "running" if silent < _SILENT_S else f"silent for {silent / 60:.0f} min"

    @property
    def is_over(self) -> bool:
        """Whether it has surely ended; a silent run on another machine may still be alive."""
        return self.state != "running" and not self.state.startswith("silent")

    @property
    def size(self) -> int:
        """How many ranks it has."""
        return len(self.logs) or int(self.record.get("size", 0))

    @property
    def started(self) -> float:
        return float(self.record.get("started", 0.0))

    @property
    def seconds(self) -> float:
        """How long it ran, or has been running."""
        if self.result and "seconds" in self.result:
            return float(self.result["seconds"])
        last = max([self.started, *(pulse.unix for pulse in self.pulses.values())])
        return (last if self.is_over else time.time()) - self.started

    @property
    def step(self) -> int | None:
        """The step that every rank has reached."""
        return min((pulse.step for pulse in self.pulses.values() if pulse.step >= 0), default=None)

    @cached_property
    def progress(self) -> Progress:
        """What the first rank's meter says."""
        rank = min(self.pulses, default=0)
        found = read_step_times(step_times_path(self.path, rank))
        return found.progress if found else Progress()

    @property
    def speed(self) -> float | None:
        """Steps a second in training, start-up excluded; since the start where no meter has counted yet."""
        if self.progress.step_s > 0:
            return 1 / self.progress.step_s
        beats = [pulse for pulse in self.pulses.values() if pulse.step > 0]
        if not beats:
            return None
        last = min(beats, key=lambda pulse: pulse.step)
        return last.step / max(last.unix - self.started, 1e-3)

    def facts(self) -> dict[str, Any]:
        """The same as JSON."""
        return {
            "run": str(self.path),
            "state": self.state,
            "command": self.command,
            "ranks": self.size,
            "host": self.record.get("host"),
            "started": self.started,
            "seconds": round(self.seconds, 3),
            "step": self.step,
            "steps_per_second": self.speed and round(self.speed, 3),
            "samples_per_second": round(self.progress.samples_per_second, 1) or None,
            "exit_code": self.result and self.result.get("exit_code"),
            "failure": self.result and self.result.get("failure"),
        }


def root_of(directory: str | None) -> Path:
    """Where runs are kept."""
    return Path(directory or os.environ.get("SAMESTEP_RUN_DIR") or "runs")


def read_run(path: Path) -> Run | None:
    """The run in a directory, or None where there is none."""
    record = read_record(path / "run.json")
    if record is None or not _is_ours(record):
        return None
    logs = tuple(sorted(_numbers(path / "logs", "rank-", ".log")))
    pulses = {rank: read_pulse(pulse_path(path, rank)) for rank in _numbers(path / "pulse", "rank-", "")}
    read = {rank: pulse for rank, pulse in sorted(pulses.items()) if pulse}
    outputs = [log_path(path, rank) for rank in logs] or [job_output(path)]
    written = max((one.stat().st_mtime for one in outputs if one.exists()), default=0.0)
    return Run(path, record, read_record(path / "result.json"), read, logs, written)


def job_output(run: Path) -> Path:
    """Where Slurm keeps the output of all ranks of a batch job."""
    return run.with_name(f"{run.name}.out")


def list_runs(root: Path) -> list[Run]:
    """All runs in a directory, the newest first."""
    paths = list(root.iterdir()) if root.is_dir() else []
    found = [run for path in paths if path.is_dir() and (run := read_run(path))]
    return sorted(found, key=lambda run: (run.started, run.name), reverse=True)


def find_run(name: str | None) -> Run:
    """The run of a directory or of a name below ./runs; the newest where no name is given."""
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
    """Where a rank's output lies."""
    if not run.logs and job_output(run.path).exists():
        return job_output(run.path)
    if rank not in run.logs:
        there = f"there are ranks {min(run.logs)} to {max(run.logs)}" if run.logs else "there are none yet"
        raise UsageError(f"rank {rank} has no log in {run.path}; {there}")
    return log_path(run.path, rank)


def _is_ours(record: dict[str, Any]) -> bool:
    """Whether samestep wrote it: other programs keep a run.json in ./runs too."""
    kinds = {"argv": list, "size": int, "started": int | float}
    return all(isinstance(record.get(name), kind) for name, kind in kinds.items())


def _numbers(folder: Path, before: str, after: str) -> list[int]:
    names = os.listdir(folder) if folder.is_dir() else []
    middles = [name.removeprefix(before).removesuffix(after) for name in names if name.startswith(before)]
    return [int(middle) for middle in middles if middle.isdigit()]
