"""Trains a network at 1 and at 2 processes of this machine, and compares results and times."""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samestep.compare.compare import compare
from samestep.compare.weights import read
from samestep.errors import WorkerFailed
from samestep.measure.trial import Trial
from samestep.placement.devices import cores
from samestep.text import counted

SCRIPT = Path(__file__).parents[1] / "data" / "demo_train.py"
_EPOCH = re.compile(r"epoch (\d+) of \d+: (\S+)")


@dataclass(frozen=True)
class Setup:
    processes: int
    cores: int

    def __str__(self) -> str:
        return f"{counted(self.processes, 'process')} on {counted(self.cores, 'core')}"


@dataclass(frozen=True)
class Run:
    """A complete training run, and what its script saved."""

    setup: Setup
    saved: dict[str, Any]
    seconds: float  # including the start of Python and torch

    @property
    def rate(self) -> float:
        """Samples per second in the fastest epoch, which was disturbed least."""
        return float(self.saved["trained"] / min(self.saved["seconds"]))

    @property
    def disturbed(self) -> bool:
        """Whether a quarter of the epochs took 1.5 times as long as the fastest."""
        ordered = sorted(self.saved["seconds"])
        return bool(ordered[len(ordered) * 3 // 4] > 1.5 * ordered[0])


def setups() -> list[Setup]:
    return [Setup(1, 1), Setup(2, 2), Setup(1, 2)] if len(cores()) > 1 else [Setup(1, 1), Setup(2, 1)]


def train(setup: Setup, directory: Path, epochs: int, report: Callable[[int, str, str], None]) -> Run:
    """Run the script, report finished epochs and the latest accuracy, and read what the script saved."""
    out = directory / f"{setup.processes}-{setup.cores}.pt"
    lines = []

    def on_line(line: str) -> None:
        if epoch := _EPOCH.match(line):
            report(int(epoch[1]), f"{setup} ...", f" {epoch[2]}")
        else:
            lines.append(line)

    report(0, f"{setup} ...", "")
    env = {
        # On a busy machine, threads that spin while waiting take ten times as long.
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
        "CUDA_VISIBLE_DEVICES": "",
        "HIP_VISIBLE_DEVICES": "",
        "SAMESTEP_EXACT_THREADS": str(max(1, setup.cores // setup.processes)),
    }
    words = [str(SCRIPT), "--epochs", str(epochs), "--out", str(out)]
    result = Trial(words, setup.processes, directory / out.stem, env, setup.cores).run(on_line)
    if result.code:
        raise WorkerFailed("\n".join([f"{setup} ended with exit code {result.code}:", *lines]))
    saved = read(out).state
    assert isinstance(saved, dict)
    return Run(setup, saved, result.seconds)


def table(runs: Sequence[Run]) -> list[str]:
    """The runs as columns of a table; the third run only measures speed."""
    rows: dict[str, list[object]] = {}
    for number, run in enumerate(runs):
        saved = run.saved
        cells = {
            "processes": run.setup.processes,
            "cores": run.setup.cores,
            "samples/s": f"{run.rate:.0f}",
            "speed-up": f"{run.rate / runs[0].rate:.2f}",
        }
        if number < 2:
            cells["training, s"] = f"{sum(saved['seconds']):.1f}"
            cells["with start, s"] = f"{run.seconds:.1f}"
            cells["test accuracy"] = f"{saved['correct'] / saved['tested']:.2%}"
            cells["batches"] = saved["order"][:8]  # a digest of all samples
        for name, cell in cells.items():
            rows.setdefault(name, []).append(cell)
    return [f"{name:13}" + "".join(f"{cell:>9}" for cell in cells) for name, cells in rows.items()]


def compared(runs: Sequence[Run]) -> tuple[bool, list[str]]:
    """Whether one process and two are the same to the bit, with the lines of the report."""
    first, second = (run.saved for run in runs[:2])
    result = compare(*({part: saved[part] for part in ("model", "optimizer")} for saved in (first, second)))
    facts = {"batches": "order", "test accuracy": "correct"}
    same = {name: first[key] == second[key] for name, key in facts.items()}
    largest = max((difference.absolute for difference in result.differences), default=0.0)
    is_same = all(same.values()) and result.verdict == "same"
    return is_same, [
        f"1 process and 2 took {first['steps']} steps each:",
        *(f"  {'the same' if is_equal else 'different'} {name}" for name, is_equal in same.items()),
        f"  largest difference in {result.contents} (weights, BatchNorm, optimizer): {largest:g}",
        "same to the bit" if is_same else str(result) if result.differences else "different",
    ]


def speeds(runs: Sequence[Run]) -> str:
    """Sentences: whether more processes are worth it on this machine."""
    if len(runs) == 2:
        return (
            "This machine gives one core: two processes take turns on it and cannot be faster. "
            "What they show here is that both take the same steps."
        )
    two, wide = (run.rate / runs[0].rate for run in runs[1:])
    busy = "Some epochs took much longer than others: the machine was busy. Try again when it is idle."
    return (
        f"Two processes, each with a core, are {two:.2f} times as fast as one process with one core. One process with "
        f"both cores is {wide:.2f} times as fast. More processes pay where each brings a device or cores of its own."
    ) + f" {busy}" * any(run.disturbed for run in runs)
