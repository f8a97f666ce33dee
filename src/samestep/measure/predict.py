"""Predicts throughput for sizes and links that were not run, from measured parts, buckets and a link.

docs/prediction.md describes the model. Covered: exchange in lanes that overlaps with backward, shares of the batch,
jitter of ranks. Not covered: different links within a run, and exchange that takes cores from compute.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import log2
from pathlib import Path
from statistics import fmean, linear_regression, median
from tempfile import TemporaryDirectory

from samestep.errors import UsageError, WorkerFailed
from samestep.measure.scale import Plan, Variant
from samestep.measure.trial import Trial
from samestep.measure.verdict import Row
from samestep.placement.devices import cores
from samestep.rundir import step_times_path
from samestep.steptimes import PARTS, SHOWN, read_step_times
from samestep.text import figures, percent

SWEEP = Path(__file__).parents[1] / "data" / "sweep.py"
CAPS_MB = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 25.0)
_FIRST_MB = 1.0  # DDP's default for the first bucket
_MB = 1 << 20
_ERROR = 0.05  # the relative error of the model itself, see docs/prediction.md
_FINE_MB = 0.05
_SHARED = ("data", "copy", "forward", "backward")  # parts that shrink with the number of samples
_UNITS = {"bit": 0.125, "B": 1.0}
_SCALES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9}
_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
Ready = Sequence[tuple[float, float]]  # for each bucket: seconds after the begin of backward, and bytes


@dataclass(frozen=True)
class Link:
    """A link between two neighbours: bytes per second, and seconds of a message one way."""

    bandwidth: float
    latency_s: float
    is_gloo: bool = True

    @property
    def lanes(self) -> int:
        """How many buckets are exchanged at the same time: Gloo has two threads, NCCL has a single queue."""
        return 2 if self.is_gloo else 1

    def latency_of(self, size: int) -> float:
        """The latency of an all-reduce among `size` processes."""
        if self.is_gloo:
            return 4 * (size - 1) * self.latency_s
        return 2 * min(size - 1, 2 * log2(size)) * self.latency_s

    def seconds_of(self, num_bytes: float, size: int) -> float:
        """The time of an all-reduce's bytes on the link at full bandwidth."""
        return 2 * (size - 1) / size * num_bytes / self.bandwidth

    def __str__(self) -> str:
        return f"{figures(self.bandwidth / 1e9)} GB/s, {figures(1e6 * self.latency_s)} us"


def link_of(text: str, *, is_gloo: bool) -> Link:
    """Parse a link such as `25GB/s,5us` or `200Mbit/s,0.1ms`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kMG]?)(B|bit)/s, ?(\d+(?:\.\d+)?) ?(us|ms|s)", text)
    if not match or not float(match[1]):
        raise UsageError(
            f"--link {text} is not a bandwidth and a latency; write for instance --link 25GB/s,5us or 10Gbit/s,50us"
        )
    bandwidth = float(match[1]) * _SCALES[match[2]] * _UNITS[match[3]]
    return Link(bandwidth, float(match[4]) * _TIMES[match[5]], is_gloo)


def exchange_end(ready: Ready, size: int, link: Link) -> float:
    """When the last all-reduce ends; each bucket waits for a lane, then takes its latency and its bytes."""
    waiting = [(at, link.latency_of(size), link.seconds_of(num_bytes, size)) for at, num_bytes in ready]
    active: list[list[float]] = []  # by bucket: the remaining latency, and the remaining time on the link
    now = 0.0
    while waiting or active:
        while waiting and len(active) < link.lanes and waiting[0][0] <= now:
            active.append(list(waiting.pop(0)[1:]))
        sending = sum(1 for latency, _ in active if latency <= 0)
        ends = [left if left > 0 else on_link * sending for left, on_link in active]
        if waiting and len(active) < link.lanes:
            ends.append(waiting[0][0] - now)
        step = max(0.0, min(ends))
        for bucket in active:
            if bucket[0] > 0:
                bucket[0] = bucket[0] - step if bucket[0] - step > 1e-12 else 0.0
            else:
                bucket[1] -= step / sending
        active = [bucket for bucket in active if bucket[0] > 0 or bucket[1] > 1e-12]
        now += step
    return now


def buckets(fine: Ready, cap_mb: float | None) -> list[tuple[float, float]]:
    """Join small buckets as DDP does; None is its default: 1 MB for the first bucket, 25 MB for the others."""
    joined: list[tuple[float, float]] = []
    held = 0.0
    for at, (ready, num_bytes) in enumerate(fine):
        held += num_bytes
        cap = cap_mb if cap_mb is not None else (25.0 if joined else _FIRST_MB)
        if held >= cap * _MB or at == len(fine) - 1:
            joined.append((ready, held))
            held = 0.0
    return joined


@dataclass(frozen=True)
class Prediction:
    """The prediction for a size: throughput with an interval, and the best size of buckets."""

    size: int
    step_s: float
    samples_per_second: float
    low: float
    high: float
    efficiency: float
    waits: float  # the fraction of the step in which processes wait for the exchange
    best_mb: float
    best_gain: float
    link: str

    def cells(self) -> list[str]:
        rates = [f"{self.samples_per_second:,.0f}", f"{self.low:,.0f}-{self.high:,.0f}"]
        return [str(self.size), *rates, percent(self.efficiency), percent(self.waits)]


@dataclass(frozen=True)
class Model:
    """A script's model: parts that shrink with the share of a batch, parts that do not, buckets, and the link."""

    rows: Sequence[Row]
    fine: Ready  # small buckets; times as fractions of backward
    link: Link
    batch: float
    pieces: int  # samples or microbatches of a step, of which a rank has at least one
    jitter: Sequence[float]  # a rank's step times relative to their mean, ascending
    weak: bool = False

    def part(self, size: int, name: str) -> float:
        """Seconds of a part at a size: a + b * share, fitted to the measured sizes; with a single size, see _SHARED."""
        # The step waits for the rank with the largest share: of 64 samples on 48 ranks, that is 2.
        seconds = [fmean(row.of_rank(rank)[name] for rank in range(row.variant.size)) for row in self.rows]
        if self.weak:
            return median(seconds)
        shares = [1 / row.variant.size for row in self.rows]
        largest = -(-self.pieces // size) / self.pieces
        if len(shares) == 1:
            return seconds[0] * largest / shares[0] if name in _SHARED else seconds[0]
        mean, share = sum(seconds) / len(seconds), sum(shares) / len(shares)
        slope = max(0.0, min(linear_regression(shares, seconds).slope, mean / share))
        return mean + slope * (largest - share)

    def step_s(self, size: int, cap_mb: float | None = None) -> tuple[float, float]:
        """Seconds of a step, and the part of them that waits for the exchange."""
        own = sum(self.part(size, name) for name in PARTS if name not in SHOWN["exchange"])
        backward, waits = self.part(size, "backward"), 0.0
        if size > 1:
            ready = [(fraction * backward, num_bytes) for fraction, num_bytes in buckets(self.fine, cap_mb)]
            waits = max(0.0, exchange_end(ready, size, self.link) - backward)
        return own * self._slowest_of(size) + waits, waits

    def predict(self, size: int) -> Prediction:
        if size > self.pieces and not self.weak:  # samestep.loader refuses it
            raise WorkerFailed(
                f"{size} processes cannot share the {self.pieces} samples or microbatches of a step; with --weak each "
                "process has as many"
            )
        step, waits = self.step_s(size)
        by_cap = {cap: self.step_s(size, cap)[0] for cap in CAPS_MB}
        best = min(by_cap, key=lambda cap: by_cap[cap])
        measured = self.rows[0].step_s
        spread = 1 + (measured.high - measured.low) / 2 / measured.value + _ERROR
        rate = self.batch * (size if self.weak else 1) / step
        first = self.rows[0]  # efficiencies of the measured sizes are relative to it, too
        efficiency = rate * first.variant.size / first.throughput.value / size
        interval, gain = (rate / spread, rate * spread), step / by_cap[best]
        return Prediction(size, step, rate, *interval, efficiency, waits / step, best, gain, str(self.link))

    def _slowest_of(self, size: int) -> float:
        """The slowest rank's time relative to the mean: the expected largest of `size` draws from the jitter."""
        count = len(self.jitter)
        weights = (((index + 1) / count) ** size - (index / count) ** size for index in range(count))
        return sum(ratio * weight for ratio, weight in zip(self.jitter, weights, strict=True))


def model_of(plan: Plan, rows: Sequence[Row], link: Link | None) -> Model:
    """Record the script's buckets in a further run, and measure the link if it is not given."""
    fine, jitter, pieces = _recorded(plan, rows[-1].variant.cores)
    first = rows[0].runs[0].said
    batch = first.samples_per_second * first.step_s / (rows[0].variant.size if plan.weak else 1)
    return Model(rows, fine, link or measure_link(), batch, pieces, jitter, plan.weak)


def measure_link() -> Link:
    """Measure the link between two processes of this machine by all-reduces of several sizes."""
    with TemporaryDirectory(prefix="samestep-") as directory:
        result = Trial([str(SWEEP)], 2, Path(directory), cores=min(2, len(cores()))).run().checked()
        is_gloo, sweep = json.loads(result.printed()[-1])
        return link_from_sweep(sweep, 2, is_gloo=is_gloo)


def link_from_sweep(sweep: Sequence[tuple[float, float]], size: int, *, is_gloo: bool = True) -> Link:
    """The latency from the smallest all-reduce, and the bandwidth from differences between large all-reduces."""
    # Total times of large all-reduces would show a too high bandwidth: a burst may carry their first bytes.
    took, latency_s = [seconds for _, seconds in sweep], sweep[0][1]
    slope = linear_regression([num_bytes for num_bytes, _ in sweep[-3:]], took[-3:]).slope
    if slope <= 0 or min(took) < 0.8 * latency_s or took[-1] < 1.2 * latency_s:
        raise WorkerFailed("the link cannot be measured while the machine is so busy; give it with --link")
    steps = 4 * (size - 1) if is_gloo else 2 * (size - 1)
    return Link(2 * (size - 1) / size / slope, latency_s / steps, is_gloo)


def _recorded(plan: Plan, each: int) -> tuple[list[tuple[float, float]], list[float], int]:
    """From a run without exchange: small buckets with ready times as fractions of backward, the jitter, and pieces."""
    with TemporaryDirectory(prefix="record-", dir=plan.directory) as directory:
        record_file = Path(directory, "buckets.jsonl").absolute()
        env = {
            "SAMESTEP_RECORD_BUCKETS": str(record_file),
            "SAMESTEP_DDP": json.dumps({"bucket_cap_mb": _FINE_MB}),
            "SAMESTEP_CHECK_EVERY": "0",
        }
        result = plan.trial(Variant(2, each), Path(directory, "run"), env).run().checked()
        if not record_file.exists():
            raise WorkerFailed(f"{plan.script[0]} has no replica whose buckets could be recorded")
        lines = record_file.read_text().splitlines()
        recorded: list[list[tuple[float, int]]] = [json.loads(line) for line in lines]
        times = read_step_times(step_times_path(result.run.path, 0))
    assert times is not None
    fractions = []
    for step in times.steps:
        parts = dict(zip(PARTS, step.parts, strict=True))
        begin = step.began + parts["data"] + parts["copy"] + parts["forward"]
        marks = next((row for row in recorded if begin - 1e-4 <= row[0][0] <= step.began + step.seconds), [])
        if len(marks) == len(recorded[-1]):
            fractions.append([min(1.0, max(0.0, (at - begin) / parts["backward"])) for at, _ in marks])
    if not fractions:
        raise WorkerFailed(f"the buckets of {plan.script[0]} could not be recorded")
    ready = accumulate((median(column) for column in zip(*fractions, strict=True)), max)
    own = [step.seconds for step in times.steps]
    jitter = sorted(seconds * len(own) / sum(own) for seconds in own)
    sizes = (float(num_bytes) for _, num_bytes in recorded[-1])
    return list(zip(ready, sizes, strict=True)), jitter, times.progress.pieces
