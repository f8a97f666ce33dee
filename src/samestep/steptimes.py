"""The times of a rank's training steps in a file: sums over the run, and the latest steps."""

import mmap
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import NamedTuple

from samestep.files import in_memory, read_regular
from samestep.text import duration, percent, step_time

# What reports show, and the measured parts of a step that belong to it. `exchange` is the time that backward waits for
# the exchange of gradients, with the wait for a slower rank; `call` is the time of other collective calls.
SHOWN = {
    "data": ("data", "copy"),
    "compute": ("forward", "backward"),
    "exchange": ("exchange", "call"),
    "slowest rank": (),
    **{name: (name,) for name in ("optimizer", "checkpoint", "evaluation", "rest")},
}
PARTS = tuple(part for parts in SHOWN.values() for part in parts)
START_UP_STEPS = 3  # not in the sums: DDP builds its buckets, and allocators warm up
KEPT_STEPS = 1024
_MOST_STEPS = 0.7  # the slowest rank is slowest in at least this part of the steps

_MAGIC = b"steps\0\0\3"
_HEADER = struct.Struct("<QQQQqqiiiddddddi")  # the fields of Progress
_SUMS = struct.Struct(f"<{len(PARTS)}d")
_ROW = struct.Struct(f"<qdII{len(PARTS)}f")  # step, when it began, samples of this rank and of all, parts
_AT_SUMS = len(_MAGIC) + _HEADER.size
_AT_ROWS = _AT_SUMS + _SUMS.size
_BYTES = _AT_ROWS + KEPT_STEPS * _ROW.size


class Step(NamedTuple):
    """One step of one rank; times in seconds, `began` by the monotonic clock of its node."""

    number: int
    began: float
    mine: int
    all: int
    parts: tuple[float, ...]

    @property
    def seconds(self) -> float:
        return sum(self.parts)


@dataclass
class Progress:
    """The counts and sums in a rank's file."""

    rows: int = 0  # all training steps
    steps: int = 0  # the steps in the sums: all but the start-up
    mine: int = 0  # samples of this rank in them
    all: int = 0  # samples of all ranks in them
    step: int = 0  # the number of the last step, as in messages
    end: int = 0  # `rows` at the end of the requested epochs; 0 if that is unknown
    batches: int = 0  # of an epoch
    epochs: int = 0  # asked for
    epoch: int = 0
    exchanged_s: float = 0.0  # the time of exchanges, if torch measured it
    hidden_s: float = 0.0  # the part of it that overlaps with backward
    loss: float = float("nan")
    first: float = 0.0  # when the first step of the sums began
    last: float = 0.0  # when the last step ended
    between_s: float = 0.0  # outside of steps, between `first` and `last`
    pieces: int = 0  # that ranks can share in the largest step: samples, or microbatches

    @property
    def step_s(self) -> float:
        """Seconds of an average step, start-up excluded."""
        return (self.last - self.first - self.between_s) / self.steps if self.steps else 0.0

    @property
    def samples_per_second(self) -> float:
        return self.all / self.steps / self.step_s if self.step_s > 0 else 0.0

    @property
    def left_s(self) -> float | None:
        """Seconds to the end of the requested epochs, with evaluation and commits."""
        if not self.end or not self.steps:
            return None
        return max(0.0, (self.end - self.rows) * (self.last - self.first) / self.steps)

    def __str__(self) -> str:
        """`epoch 3 of 10, step 417, 1,214 samples/s, 12 min 4 s left, loss 0.312`."""
        total = f" of {self.epochs}" if self.epochs else ""
        parts = [f"epoch {self.epoch + 1}{total}", f"step {self.step}"]
        if self.steps:
            parts.append(f"{self.samples_per_second:,.0f} samples/s")
        if self.left_s is not None:
            parts.append(f"{duration(self.left_s)} left")
        if not isnan(self.loss):
            parts.append(f"loss {self.loss:.4g}")
        return ", ".join(parts)


class StepTimes:
    """A rank's step times, written after each step into memory that other processes may read."""

    def __init__(self, path: Path | None) -> None:
        """Without a path, only this process can read them."""
        self.progress = Progress()
        self.sums = [0.0] * len(PARTS)
        self._memory: mmap.mmap | bytearray = bytearray(_BYTES)
        if path is not None:
            with suppress(OSError):  # after an error, such as a full disk, the run and its meter go on
                self._memory = in_memory(path, _MAGIC, _BYTES)

    def add(
        self, step: int, began: float, ended: float, mine: int, batch: int, parts: Sequence[float]
    ) -> None:
        now = self.progress
        row = (step, began, mine, batch, *parts)
        _ROW.pack_into(self._memory, _AT_ROWS + now.rows % KEPT_STEPS * _ROW.size, *row)
        now.rows += 1
        if now.rows > START_UP_STEPS:
            if now.steps:
                now.between_s += began - now.last
            else:
                now.first = began
            now.last = ended
            now.steps += 1
            now.mine += mine
            now.all += batch
            for at, seconds in enumerate(parts):
                self.sums[at] += seconds
        header = vars(now).values()
        _HEADER.pack_into(self._memory, len(_MAGIC), *header)
        _SUMS.pack_into(self._memory, _AT_SUMS, *self.sums)

    def read(self) -> "Reading":
        """What another process would read."""
        return _read(bytes(self._memory))


@dataclass(frozen=True)
class Reading:
    """The content of a rank's file at one time."""

    progress: Progress
    sums: Mapping[str, float]  # seconds of each part, over the steps of `progress`
    steps: Sequence[Step]  # the latest steps without the start-up


def read_step_times(path: Path) -> Reading | None:
    """Read a rank's file; None if there is no such file of this version."""
    try:
        data = read_regular(path, _BYTES, 2)
    except OSError:
        return None
    return _read(data) if len(data) == _BYTES and data.startswith(_MAGIC) else None


def _read(data: bytes) -> Reading:
    progress = Progress(*_HEADER.unpack_from(data, len(_MAGIC)))
    sums = dict(zip(PARTS, _SUMS.unpack_from(data, _AT_SUMS), strict=True))
    rows = []
    for row in range(max(START_UP_STEPS, progress.rows - KEPT_STEPS), progress.rows):
        number, began, mine, batch, *parts = _ROW.unpack_from(data, _AT_ROWS + row % KEPT_STEPS * _ROW.size)
        rows.append(Step(number, began, mine, batch, tuple(parts)))
    return Reading(progress, sums, rows)


@dataclass(frozen=True)
class Breakdown:
    """Where an average step's time goes, as a mean over the ranks; the parts of SHOWN add up to the step."""

    step_s: float
    samples_per_second: float
    samples_per_epoch: int
    parts: Mapping[str, float]
    ranks: Sequence[Mapping[str, float]]  # PARTS of each rank's average step
    slowest: int | None  # the rank that is slowest in most steps, if there is one
    hidden: float | None  # the fraction of the exchange that overlaps with backward, if measured

    def __str__(self) -> str:
        """`1,214 samples/s, step 52.7 ms of 64 samples: data 2 %, exchange 11 % (64 % of all exchange hidden), ...`."""
        notes = {"slowest rank": f" (rank {self.slowest})"} if self.slowest is not None else {}
        if self.hidden is not None:
            notes["exchange"] = f" ({percent(self.hidden)} of all exchange hidden)"
        texts = [
            f"{name} {percent(seconds / self.step_s)}{notes.get(name, '')}"
            for name, seconds in self.parts.items()
            if seconds >= 0.005 * self.step_s
        ]
        rate, batch = self.samples_per_second, round(self.samples_per_second * self.step_s)
        step = f"step {step_time(self.step_s)} of {batch:,} samples"
        return f"{rate:,.0f} samples/s, {step}: {', '.join(texts)}"


def breakdown(readings: Mapping[int, Reading]) -> Breakdown | None:
    """The times of all ranks together; None if a rank has finished no step after the start-up."""
    progress = [reading.progress for reading in readings.values()]
    if not progress or not all(counts.steps for counts in progress):
        return None
    ranks = [{name: rank.sums[name] / rank.progress.steps for name in PARTS} for rank in readings.values()]
    mean = {name: sum(rank[name] for rank in ranks) / len(ranks) for name in PARTS}
    parts = {name: sum(mean[part] for part in measured) for name, measured in SHOWN.items()}
    waits = _waits(readings)
    total = sum(map(sum, waits.values()))
    least = sum(map(min, zip(*waits.values(), strict=True))) * len(waits)
    _move(parts, "exchange", "slowest rank", parts["exchange"] * (1 - least / total) if total else 0.0)
    # while rank 0 saves or evaluates alone, the others wait in their next exchange: count that time as its cause
    for name in ("checkpoint", "evaluation"):
        _move(parts, "slowest rank", name, max(rank[name] for rank in ranks) - mean[name])
    # the shortest exchange: those of other ranks include their wait for the slowest rank
    exchanged_s, hidden_s = min((rank.exchanged_s, rank.hidden_s) for rank in progress)
    first, step_s = progress[0], sum(parts.values())
    batch = first.all / first.steps
    hidden = hidden_s / exchanged_s if exchanged_s else None
    samples = round(batch * first.batches)
    return Breakdown(step_s, batch / step_s, samples, parts, ranks, _slowest(waits), hidden)


def _move(parts: dict[str, float], source: str, to: str, seconds: float) -> None:
    moved = min(seconds, parts[source])
    parts[source], parts[to] = parts[source] - moved, parts[to] + moved


def _waits(readings: Mapping[int, Reading]) -> dict[int, list[float]]:
    """How long each rank waited for others in each step that all files hold; the slowest rank waits least."""
    waited = [PARTS.index(name) for name in SHOWN["exchange"]]
    by_step = {
        rank: {step.number: sum(step.parts[index] for index in waited) for step in reading.steps}
        for rank, reading in readings.items()
    }
    common = sorted(set.intersection(*(set(steps) for steps in by_step.values())))
    return {rank: [steps[number] for number in common] for rank, steps in by_step.items()}


def _slowest(waits: Mapping[int, Sequence[float]]) -> int | None:
    counts = Counter(min(zip(step, waits, strict=True))[1] for step in zip(*waits.values(), strict=True))
    if len(waits) < 2 or not counts:
        return None
    rank, times = counts.most_common(1)[0]
    return rank if times >= _MOST_STEPS * counts.total() else None
