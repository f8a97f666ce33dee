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
    def order(self) -> str:
        """A digest of the samples of every step, in their order."""
        return str(self.saved["order"])

    @property
    def accuracy(self) -> float:
        return float(self.saved["correct"] / self.saved["tested"])

    @property
    def training_seconds(self) -> float:
        return float(sum(self.saved["seconds"]))

    @property
    def samples_per_second(self) -> float:
        """In the fastest epoch, which other programs disturbed least."""
        return float(self.saved["trained"] / min(self.saved["seconds"]))

    @property
    def disturbed(self) -> bool:
        """Whether a quarter of the epochs took 1.5 times as long as the fastest."""
        ordered = sorted(self.saved["seconds"])
        return bool(ordered[len(ordered) * 3 // 4] > 1.5 * ordered[0])


@dataclass(frozen=True)
class Result:
    """The runs: one process, two, and where there is a second core one process with both."""

    one: Run
    two: Run
    wide: Run | None

    @property
    def runs(self) -> Sequence[Run]:
        return [run for run in (self.one, self.two, self.wide) if run]

    @cached_property
    def comparison(self) -> Comparison:
        """Of the weights, BatchNorm statistics and optimizer state of one process and two."""
        parts = ("model", "optimizer")
        return compare(*({part: run.saved[part] for part in parts} for run in (self.one, self.two)))

    @property
    def largest(self) -> float:
        """The largest absolute difference."""
        return max((found.absolute for found in self.comparison.differences), default=0.0)

    @property
    def same_batches(self) -> bool:
        return self.one.order == self.two.order

    @property
    def same_accuracy(self) -> bool:
        return self.one.accuracy == self.two.accuracy

    @property
    def same(self) -> bool:
        return self.same_batches and self.same_accuracy and self.comparison.verdict == "same"

    def speedup(self, run: Run) -> float:
        """How much faster than one process on one core."""
        return run.samples_per_second / self.one.samples_per_second


def setups() -> list[Setup]:
    """What can be compared on this machine."""
    return [Setup(1, 1), Setup(2, 2), Setup(1, 2)] if len(cores()) > 1 else [Setup(1, 1), Setup(2, 1)]


def train(setup: Setup, directory: Path, epochs: int, told: Callable[[int, str], None]) -> Run:
    """Run the script, tell each epoch's number and accuracy, and read what it saved."""
    out = directory / f"{setup.processes}-{setup.cores}.pt"
    lines = []

    def heard(line: str) -> None:
        if epoch := _EPOCH.match(line):
            told(int(epoch[1]), epoch[2])
        else:
            lines.append(line)

    result = Trial(
        [str(SCRIPT), "--epochs", str(epochs), "--out", str(out)],
        setup.processes,
        directory / out.stem,
        env={
            # On a busy machine threads that spin for each other take ten times as long.
            "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
            "CUDA_VISIBLE_DEVICES": "",
            "HIP_VISIBLE_DEVICES": "",
            "SAMESTEP_EXACT_THREADS": str(max(1, setup.cores // setup.processes)),
        },
        cores=setup.cores,
    ).run(heard)
    if result.code:
        raise WorkerFailed("\n".join([f"{setup} ended with exit code {result.code}:", *lines]))
    saved = read(out).state
    assert isinstance(saved, dict)
    return Run(setup, saved, result.seconds)


def in_words(result: Result) -> str:
    """Says from the speeds whether more processes pay."""
    if result.wide is None:
        return (
            "This machine gives one core: two processes take turns on it and cannot be faster. "
            "What they show here is that both take the same steps."
        )
    two, wide = result.speedup(result.two), result.speedup(result.wide)
    first = (
        f"Two processes, each with a core, are {two:.2f} times as fast as one."
        if two > 1 + _NOISE
        else f"Two processes are no faster here than one ({two:.2f} times): the network is small, or the "
        "cores are busy with other things."
    )
    if wide > two * (1 + _NOISE):
        second = f"One process with both cores is faster than two ({wide:.2f} times)."
    elif two > wide * (1 + _NOISE):
        second = f"One process with both cores is {wide:.2f} times as fast."
    else:
        second = f"One process with both cores is as fast as two ({wide:.2f} times)."
    last = f"{first} {second} More processes pay where each brings a device or cores of its own."
    if any(run.disturbed for run in result.runs):
        last += " Some epochs took much longer than others: the machine was busy. Try again when it is idle."
    return last
