"""What measured runs say: throughput, speed-up and efficiency with their spread, what limits them, what would help."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import log2
from statistics import median
from typing import Any

from samestep.measure.plots import Spread
from samestep.measure.scale import Measured, Variant
from samestep.steptimes import PARTS

PARTS_SHOWN = ("data", "compute", "exchange", "slowest", "optimizer", "checkpoint", "evaluation", "rest")
_OF = {"copy": "data", "forward": "compute", "backward": "compute", "call": "exchange"}
_LEAST = 0.1  # a part below a tenth of the step is no limit
_WORTH = 1.3  # what a doubling has to gain
_ADVICE = {
    "data": "give the loader more workers (num_workers=), faster storage or less to do for each sample",
    "exchange": "a larger batch, fewer exchanges (samestep.steps with no_sync), a faster link, or smaller buckets for "
    "a slow one (see scale --predict)",
    "slowest": "look at what is different there: cores, other programs, samples that take longer",
    "optimizer": "every process takes the whole optimizer step: fused=True, or a simpler optimizer",
    "checkpoint": "commit less often (every=)",
    "evaluation": "evaluate less often",
    "rest": "look at what the loop does after backward() besides the optimizer's step: logging, .item(), "
    "metrics",
    "compute": "give each process more samples (a larger batch), or use fewer processes",
}


@dataclass(frozen=True)
class Row:
    """All runs of one variant, beside those of the first one."""

    variant: Variant
    runs: Sequence[Measured]
    base: Sequence[Measured]
    weak: bool

    @cached_property
    def throughput(self) -> Spread:
        return Spread.of(run.samples_per_second for run in self.runs)

    @cached_property
    def step_s(self) -> Spread:
        return Spread.of(run.step_s for run in self.runs)

    @cached_property
    def speedup(self) -> Spread:
        """Formed within each repeat, so that what disturbs the machine for long cancels out."""
        base = {run.repeat: run.samples_per_second for run in self.base}
        return Spread.of(run.samples_per_second / base[run.repeat] for run in self.runs if run.repeat in base)

    @property
    def efficiency(self) -> float:
        return self.speedup.value * self.base[0].variant.size / self.variant.size

    @cached_property
    def parts(self) -> dict[str, float]:
        """Seconds of a step by part, scaled to the median step."""
        found = dict.fromkeys(PARTS_SHOWN, 0.0)
        for name in (*PARTS, "slowest"):
            found[_OF.get(name, name)] += median(run.parts[name] for run in self.runs)
        for name in (
            "checkpoint",
            "evaluation",
        ):  # what rank 0 does alone the others wait for in the next exchange
            ranks = [median(run.ranks[rank][name] for run in self.runs) for rank in range(self.variant.size)]
            waited = min(found["slowest"], max(ranks) - sum(ranks) / len(ranks))
            found[name], found["slowest"] = found[name] + waited, found["slowest"] - waited
        factor = self.step_s.value / (sum(found.values()) or 1.0)
        return {name: seconds * factor for name, seconds in found.items()}

    @property
    def hidden(self) -> float | None:
        found = [run.hidden for run in self.runs if run.hidden is not None]
        return median(found) if found else None

    @property
    def device_hours(self) -> float:
        """For one epoch."""
        return self.variant.size * self.runs[0].samples_per_epoch / self.throughput.value / 3600

    def facts(self) -> dict[str, Any]:
        """As JSON."""
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
            "device_hours_per_epoch": self.device_hours,
            "parts_s": self.parts,
            "exchange_hidden": self.hidden,
        }


def rows_of(measured: Sequence[Measured], variants: Sequence[Variant], weak: bool = False) -> list[Row]:
    """By variant, in the order of the plan."""
    runs = {one: [run for run in measured if run.variant == one] for one in variants}
    return [
        Row(one, runs[one], runs[variants[0]], weak) for one in variants if runs[one] and runs[variants[0]]
    ]


@dataclass(frozen=True)
class Limit:
    """What takes the largest part of a step besides compute that more processes would share."""

    name: str
    seconds: float
    share: float
    rank: int | None = None
    because: str = ""

    def __str__(self) -> str:
        share = f"{1e3 * self.seconds:.3g} ms of each step, {self.share:.0%}".replace("%", " %")
        return {
            "data": f"The loader limits it: processes wait for data ({share}).",
            "exchange": f"The link limits it: processes wait for the exchange of gradients ({share}).",
            "slowest": f"A slow rank limits it: the others wait for {self._who()} ({share}){self.because}.",
            "optimizer": f"The optimizer limits it ({share}).",
            "checkpoint": f"Checkpoints limit it ({share}, spread over all steps).",
            "evaluation": f"Evaluation inside the loop limits it ({share}).",
            "rest": f"The script's own code in the loop limits it ({share}).",
            "compute": "The model limits it: with more processes each has fewer samples, and computing them does not "
            f"become so much faster ({share} more than an equal part).",
        }[self.name]

    def _who(self) -> str:
        return f"rank {self.rank}" if self.rank is not None else "one rank, in turns"


def limit_of(row: Row, first: Row) -> Limit | None:
    """What limits a variant; None where it is compute, of which each process has an equal part."""
    step_s = row.step_s.value
    candidates = {name: seconds for name, seconds in row.parts.items() if name != "compute"}
    share = 1.0 if row.weak else first.variant.size / row.variant.size
    candidates["compute"] = row.parts["compute"] - first.parts["compute"] * share
    slow, because = _slow_rank(row)
    if slow is not None:  # all others wait for it, and it for none of them
        candidates["slowest"] *= row.variant.size / (row.variant.size - 1)
    name = max(candidates, key=lambda name: candidates[name])
    if candidates[name] < _LEAST * step_s:
        return None
    return Limit(name, candidates[name], candidates[name] / step_s, slow, because)


def _slow_rank(row: Row) -> tuple[int | None, str]:
    named = [run.slowest for run in row.runs]
    rank = max(set(named), key=named.count)
    if rank is None or len(row.runs[0].ranks) <= rank:
        return rank, ""
    ranks = [
        {name: median(run.ranks[at][name] for run in row.runs) for name in PARTS}
        for at in range(row.variant.size)
    ]
    others = {name: median(one[name] for at, one in enumerate(ranks) if at != rank) for name in PARTS}
    longer = {name: ranks[rank][name] - others[name] for name in PARTS}
    part = max(longer, key=lambda name: longer[name])
    here, there = 1e3 * ranks[rank][part], 1e3 * others[part]
    return rank, f"; its {part} takes {here:.3g} ms, that of the others {there:.3g} ms"


def verdict(rows: Sequence[Row]) -> str:
    """In words: what the extra processes bring, up to where they are worth it, what limits, and what would help."""
    first, last = rows[0], rows[-1]
    if any(row.variant.settings for row in rows):
        return f"{_best(rows)} {_limits(last, first)}"
    said = [_gain(last, first)] if len(rows) > 1 else []
    return " ".join([*said, *_knee(rows), _limits(last, first)])


def _gain(row: Row, first: Row) -> str:
    speed, base = row.speedup, _processes(first.variant.size)
    times = f"{speed.value:.2f} times as fast as {base} ({speed.low:.2f}-{speed.high:.2f}"
    return f"{_processes(row.variant.size)} are {times}), an efficiency of {_percent(row.efficiency)}."


def _knee(rows: Sequence[Row]) -> list[str]:
    """How much each doubling gained, and the last size that was worth it."""
    if len(rows) < 2:
        return []
    gains = []
    for before, after in pairwise(rows):
        ratio = after.variant.size / before.variant.size
        gain = after.speedup.value / before.speedup.value
        gains.append(gain ** (1 / log2(ratio)) if ratio > 1 else 1.0)
    knee = next((at for at, gain in enumerate(gains) if gain < _WORTH), len(gains))
    said = []
    if len(rows) > 2:
        sizes = f"from {rows[-2].variant.size} to {_processes(rows[-1].variant.size)}"
        said.append(
            f"Going {sizes} made it {rows[-1].speedup.value / rows[-2].speedup.value:.2f} times as fast."
        )
    hours, once = rows[knee].device_hours, f"{rows[0].device_hours:.2g} at {rows[0].variant.size}"
    if knee == 0:
        said.append(f"More than {_processes(rows[0].variant.size)} is not worth it here.")
    else:
        said.append(
            f"It is worth it up to {_processes(rows[knee].variant.size)} ({hours:.2g} device-hours an epoch, {once})."
        )
    return said


def _best(rows: Sequence[Row]) -> str:
    """Which setting is fastest, and whether that is more than the noise."""
    best = max(rows, key=lambda row: row.throughput.value)
    others = [row for row in rows if row.variant.size == best.variant.size and row is not best]
    if not others:
        return f"{best.variant} is fastest."
    second = max(others, key=lambda row: row.throughput.value)
    ratio = Spread.of(
        mine.samples_per_second / theirs.samples_per_second
        for mine in best.runs
        for theirs in second.runs
        if mine.repeat == theirs.repeat
    )
    interval = f"{ratio.value:.2f} times {second.variant} ({ratio.low:.2f}-{ratio.high:.2f})"
    if ratio.low <= 1.0:
        return f"No setting is clearly faster than the others: {best.variant} is {interval}."
    return f"{best.variant} is fastest: {interval}."


def _limits(row: Row, first: Row) -> str:
    found = limit_of(row, first)
    if found is None:
        compute = row.parts["compute"] / row.step_s.value
        return f"Nothing but the model's own compute limits it ({_percent(compute)} of each step)."
    gain = row.step_s.value / (row.step_s.value - found.seconds) if found.share < 0.99 else 99.0
    return (
        f"{found} Without that it would be up to {gain:.2f} times as fast. What helps: {_ADVICE[found.name]}."
    )


def _processes(size: int) -> str:
    return "1 process" if size == 1 else f"{size} processes"


def _percent(fraction: float) -> str:
    return f"{fraction:.0%}".replace("%", " %")
