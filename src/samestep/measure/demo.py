"""Trains one network at 1 and at 2 processes of this machine, and says what was the same and what it took."""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from samestep.compare.compare import Comparison, compare
from samestep.compare.weights import read
from samestep.errors import WorkerFailed
from samestep.measure.trial import Trial
from samestep.placement.cores import cores
from samestep.text import counted

SCRIPT = Path(__file__).parents[1] / "data" / "demo_train.py"
_EPOCH = re.compile(r"epoch (\d+) of \d+: (\S+)")
# The speeds of two equal runs differ by about this much.
_NOISE = 0.05


@dataclass(frozen=True)
class Setup:
    """How many processes, and how many cores for all of them."""

    processes: int
    cores: int

    def __str__(self) -> str:
        return f"{counted(self.processes, 'process')} on {counted(self.cores, 'core')}"


@dataclass(frozen=True)
class Run:
    """One training from start to end, and what its script saved."""

    setup: Setup
    saved: dict[str, Any]
    seconds: float  # with the start of Python and torch

    @property
    def facts(self) -> dict[str, Any]:
        """Its numbers; `batches` is a digest of all samples, the rate that of the epoch least disturbed by others."""
        saved = self.saved
        return {
            "processes": self.setup.processes,
            "cores": self.setup.cores,
            "batches": saved["order"],
            "epochs": len(saved["seconds"]),
            "accuracy": saved["correct"] / saved["tested"],
            "training_seconds": sum(saved["seconds"]),
            "seconds": self.seconds,
            "samples_per_second": saved["trained"] / min(saved["seconds"]),
        }

    @property
    def disturbed(self) -> bool:
        """Whether a quarter of the epochs took 1.5 times as long as the fastest."""
        ordered = sorted(self.saved["seconds"])
        return bool(ordered[len(ordered) * 3 // 4] > 1.5 * ordered[0])


@dataclass(frozen=True)
class Result:
    """The runs: one process, two, and where there is a second core one process with both."""

    runs: Sequence[Run]

    @cached_property
    def comparison(self) -> Comparison:
        """Of the weights, BatchNorm statistics and optimizer state of one process and two."""
        parts = ("model", "optimizer")
        return compare(*({part: run.saved[part] for part in parts} for run in self.runs[:2]))

    @cached_property
    def facts(self) -> dict[str, Any]:
        """What the runs have in common, and the numbers of each."""
        runs = [run.facts for run in self.runs]
        for run in runs:
            run["speedup"] = run["samples_per_second"] / runs[0]["samples_per_second"]
        batches, accuracy = (runs[0][name] == runs[1][name] for name in ("batches", "accuracy"))
        return {
            "same": batches and accuracy and self.comparison.verdict == "same",
            "same_batches": batches,
            "same_accuracy": accuracy,
            "largest_difference": max((found.absolute for found in self.comparison.differences), default=0.0),
            "verdict": self.comparison.verdict,
            "steps": self.runs[0].saved["steps"],
            "speed": _in_words([run["speedup"] for run in runs], any(run.disturbed for run in self.runs)),
            "runs": runs,
        }


def setups() -> list[Setup]:
    """What can be compared on this machine."""
    return [Setup(1, 1), Setup(2, 2), Setup(1, 2)] if len(cores()) > 1 else [Setup(1, 1), Setup(2, 1)]


def train(setup: Setup, directory: Path, epochs: int, told: Callable[[int, str, str], None]) -> Run:
    """Run the script, tell how many epochs are done and the latest's accuracy, and read what the script saved."""
    out = directory / f"{setup.processes}-{setup.cores}.pt"
    lines = []

    def heard(line: str) -> None:
        if epoch := _EPOCH.match(line):
            told(int(epoch[1]), f"{setup} ...", f" {epoch[2]}")
        else:
            lines.append(line)

    told(0, f"{setup} ...", "")
    env = {
        # On a busy machine threads that spin for each other take ten times as long.
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
        "CUDA_VISIBLE_DEVICES": "",
        "HIP_VISIBLE_DEVICES": "",
        "SAMESTEP_EXACT_THREADS": str(max(1, setup.cores // setup.processes)),
    }
    words = [str(SCRIPT), "--epochs", str(epochs), "--out", str(out)]
    result = Trial(words, setup.processes, directory / out.stem, env, setup.cores).run(heard)
    if result.code:
        raise WorkerFailed("\n".join([f"{setup} ended with exit code {result.code}:", *lines]))
    saved = read(out).state
    assert isinstance(saved, dict)
    return Run(setup, saved, result.seconds)


def _in_words(speedups: Sequence[float], disturbed: bool) -> str:
    """Says from the speeds whether more processes pay."""
    if len(speedups) == 2:
        return (
            "This machine gives one core: two processes take turns on it and cannot be faster. "
            "What they show here is that both take the same steps."
        )
    _, two, wide = speedups
    first = f"Two processes, each with a core, are {two:.2f} times as fast as one."
    if two <= 1 + _NOISE:
        first = (
            f"Two processes are no faster here than one ({two:.2f} times): the network is small, or the "
            "cores are busy with other things."
        )
    second = f"is as fast as two ({wide:.2f} times)"
    if wide > two * (1 + _NOISE):
        second = f"is faster than two ({wide:.2f} times)"
    elif two > wide * (1 + _NOISE):
        second = f"is {wide:.2f} times as fast"
    last = "More processes pay where each brings a device or cores of its own."
    if disturbed:
        last += " Some epochs took much longer than others: the machine was busy. Try again when it is idle."
    return f"{first} One process with both cores {second}. {last}"
