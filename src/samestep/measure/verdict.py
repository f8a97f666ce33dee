"""Judges measured runs: throughput, speed-up and efficiency with their spread, what limits them, and what helps."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import log2
from statistics import median
from typing import Any

from samestep.measure.scale import Measured, Variant
from samestep.steptimes import PARTS, SHOWN
from samestep.text import counted, duration, percent, step_time

_LEAST = 0.1  # a part below a tenth of the step is no limit
_WORTH = 1.3  # the speed-up that makes a doubling worth it
_NOISE = 0.3  # a larger difference between equal runs is reported
# For each part of a step: the sentence if it takes the most time, and what helps.
_LIMITS = {
    "data": (
        "The loader limits {them}: the loop waits for data",
        'give the loader workers (num_workers="auto", or more of them), faster storage or less to do for each sample',
    ),
    "compute": (
        "The model limits {them}: fewer samples for each process do not make its compute shorter in proportion",
        "give each process more samples (a larger batch), or use fewer processes",
    ),
    "exchange": (
        "The exchange limits {them}: they wait for gradients, or in calls such as samestep.sum",
        "a larger batch_size, so that there is more to compute for each exchange; fewer such calls in the loop; "
        "between machines a faster link or other buckets (scale --predict says which)",
    ),
    "slowest rank": (
        "A slow rank limits {them}: the others wait for {who}",
        "look at what is different there: cores, other programs, samples that take longer",
    ),
    "optimizer": (
        "The optimizer limits {them}",
        "every process takes the whole optimizer step: fused=True, or a simpler optimizer",
    ),
    "checkpoint": ("Checkpoints limit {them}", "commit less often (every=)"),
    "evaluation": ("Evaluation inside the loop limits {them}", "evaluate less often"),
    "rest": (
        "The script's own code in the loop limits {them}",
        "look at what the loop does after backward() besides the optimizer's step: logging, .item(), metrics",
    ),
}


@dataclass(frozen=True)
class Spread:
    """A median, and the quartiles around it."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        ordered = sorted(values)
        quarter = len(ordered) // 4
        return cls(median(ordered), ordered[quarter], ordered[-1 - quarter])

    def __str__(self) -> str:
        return f"{self.value:.2f}" + (f" ({self.low:.2f}-{self.high:.2f})" if self.low < self.high else "")


@dataclass(frozen=True)
class Row:
    """All runs of a variant, and the runs of the first variant for comparison."""

    variant: Variant
    runs: Sequence[Measured]
    base: Sequence[Measured]
    weak: bool

    @property
    def processes(self) -> str:
        return counted(self.variant.size, "process")

    @cached_property
    def step_s(self) -> Spread:
        return Spread.of(run.said.step_s for run in self.runs)

    @cached_property
    def throughput(self) -> Spread:
        step_s = self.step_s
        batch = median(run.said.samples_per_second * run.said.step_s for run in self.runs)
        return Spread(batch / step_s.value, batch / step_s.high, batch / step_s.low)

    @cached_property
    def speedup(self) -> Spread:
        return self.over(self.base)

    def over(self, others: Sequence[Measured]) -> Spread:
        """The speed-up over other runs; computed within each repeat, so that long disturbances cancel out."""
        base = {run.repeat: run.said.samples_per_second for run in others}
        paired = [run for run in self.runs if run.repeat in base]
        return Spread.of(run.said.samples_per_second / base[run.repeat] for run in paired)

    @property
    def efficiency(self) -> float:
        return self.speedup.value * self.base[0].variant.size / self.variant.size

    @cached_property
    def parts(self) -> dict[str, float]:
        """Seconds of a step by part, scaled to the median step."""
        medians = {name: median(run.said.parts[name] for run in self.runs) for name in SHOWN}
        factor = self.step_s.value / (sum(medians.values()) or 1.0)
        return {name: seconds * factor for name, seconds in medians.items()}

    def of_rank(self, rank: int) -> dict[str, float]:
        """Seconds of a step that this rank spends in each of PARTS."""
        return {name: median(run.said.ranks[rank][name] for run in self.runs) for name in PARTS}

    @property
    def hidden(self) -> float | None:
        fractions = [run.said.hidden for run in self.runs if run.said.hidden is not None]
        return median(fractions) if fractions else None

    @property
    def device_s(self) -> float:
        """Seconds of all devices for one epoch."""
        return self.variant.size * self.runs[0].said.samples_per_epoch / self.throughput.value

    def facts(self) -> dict[str, Any]:
        return {
            "processes": self.variant.size,
            "cores_each": self.variant.cores,
            "settings": dict(self.variant.settings),
            "runs": len(self.runs),
            "samples_per_second": vars(self.throughput),
            "samples_per_second_each": self.throughput.value / self.variant.size,
            "step_s": vars(self.step_s),
            "speedup": vars(self.speedup),
            "efficiency": self.efficiency,
            "device_hours_per_epoch": self.device_s / 3600,
            "parts_s": self.parts,
            "exchange_hidden": self.hidden,
        }


def rows_of(measured: Sequence[Measured], variants: Sequence[Variant], weak: bool = False) -> list[Row]:
    runs = {variant: [run for run in measured if run.variant == variant] for variant in variants}
    ran = [variant for variant in variants if runs[variant]]
    return [Row(variant, runs[variant], runs[ran[0]], weak) for variant in ran]


@dataclass(frozen=True)
class Limit:
    """The part of a step that takes the most time, without the compute that more processes divide."""

    name: str
    seconds: float
    of_s: float
    them: str
    who: str = "one rank, in turns"
    because: str = ""

    def __str__(self) -> str:
        what, helps = _LIMITS[self.name]
        took = f"{step_time(self.seconds)} of each step, {percent(self.seconds / self.of_s)}"
        without, now = step_time(self.of_s - self.seconds), step_time(self.of_s)
        return (
            f"{what.format(them=self.them, who=self.who)} ({took}){self.because}. Without that a step would take "
            f"{without} instead of {now}. What helps: {helps}."
        )


def limit_of(row: Row, first: Row) -> Limit | None:
    """What limits a variant; None if it is compute, which the processes divide equally."""
    parts = dict(row.parts)
    parts["compute"] -= first.parts["compute"] * (1.0 if row.weak else first.variant.size / row.variant.size)
    slow = Counter(run.said.slowest for run in row.runs).most_common(1)[0][0]
    if slow is not None:  # the mean includes the slow rank, which waits for no other
        parts["slowest rank"] *= row.variant.size / (row.variant.size - 1)
    name = max(parts, key=lambda name: parts[name])
    if parts[name] < _LEAST * row.step_s.value:
        return None
    names = _slow_rank(row, slow) if name == "slowest rank" and slow is not None else ()
    return Limit(name, parts[name], row.step_s.value, row.variant.in_words, *names)


def _slow_rank(row: Row, rank: int) -> tuple[str, str]:
    """The name of a slow rank, and which part takes longer there than on other ranks."""
    own = row.of_rank(rank)
    ranks = [row.of_rank(other) for other in range(row.variant.processes) if other != rank]
    others = {name: median(times[name] for times in ranks) for name in PARTS}
    part = max(PARTS, key=lambda name: own[name] - others[name])
    because = f"; its {part} takes {step_time(own[part])}, that of the others {step_time(others[part])}"
    return f"rank {rank}", because


def verdict(rows: Sequence[Row]) -> str:
    """In words: what more processes gain, up to which number they are worth it, what limits, and what helps."""
    first, judged = rows[0], rows[-1]
    if any(row.variant.settings for row in rows):
        best, *others = sorted(rows, key=lambda row: -row.throughput.value)
        judged, sentences = best, [_best(best, others)] if others else []
    else:
        sentences = [*_gains(rows)] if len(rows) > 1 else []
    noise = max((row.step_s.high - row.step_s.low) / row.step_s.value for row in rows)
    if noise > _NOISE:
        differ = f"Equal runs differ by up to {percent(noise)}"
        sentences.append(f"{differ}: measure again when the machine is idle.")
    if len(judged.runs) == 1:
        sentences.append("Each was run once: --repeat 5 shows how far equal runs differ.")
    compute = f"{percent(judged.parts['compute'] / judged.step_s.value)} of each step"
    own = f"Only the model's own compute limits {judged.variant.in_words} ({compute})."
    return " ".join([*sentences, str(limit_of(judged, first) or own)])


def _gains(rows: Sequence[Row]) -> Iterable[str]:
    """Sentences: how much faster the last size is, what the last step gained, and the last size that is worth it."""
    first, last = rows[0], rows[-1]
    speed = last.speedup
    how = "slower than" if speed.high < 0.995 else "no faster than" if speed.low <= 1 else "faster than"
    yield f"{last.processes} are {how} {first.processes}: speed-up {speed}, efficiency {percent(last.efficiency)}."
    gains = []
    for before, after in pairwise(rows):
        ratio = after.variant.size / before.variant.size
        gains.append((after.speedup.value / before.speedup.value) ** (1 / log2(ratio)))
    if len(rows) > 2:
        gain = last.speedup.value / rows[-2].speedup.value
        yield f"Going from {rows[-2].variant.size} to {last.processes} made it {gain:.2f} times as fast."
    knee = rows[next((at for at, gain in enumerate(gains) if gain < _WORTH), len(gains))]
    rule = f"if a doubling has to make it {_WORTH} times as fast"
    if knee is not first:
        yield (
            f"{knee.processes} are worth it, {rule}: an epoch takes {duration(knee.device_s)} of device time instead "
            f"of {duration(first.device_s)}."
        )
        return
    exchange, step = last.parts["exchange"], first.step_s.value
    alone = f": the exchange alone takes {step_time(exchange)}, a step of {first.processes} {step_time(step)}"
    yield f"More than {first.processes} is not worth it, {rule}{alone if exchange > step else ''}."


def _best(best: Row, others: Sequence[Row]) -> str:
    """A sentence: whether the fastest setting is faster by more than the noise."""
    second = next((row for row in others if row.variant.size == best.variant.size), None)
    if second is None:
        return f"{best.variant} is fastest."
    ratio = best.over(second.runs)
    comparison = f"{ratio} times as fast as {second.variant}"
    if len(best.runs) == 1:
        return f"In one run of each, {best.variant} was {comparison}."
    if ratio.low <= 1.0:
        return f"No setting is clearly faster than the others: {best.variant} is {comparison}."
    return f"{best.variant} is fastest: {comparison}."
