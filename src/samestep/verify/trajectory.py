"""Finds the first difference between two recorded runs: in bits, and beyond rounding.

Rounding starts at the last bit and grows slowly from step to step; a mistake makes a jump. A distance is beyond
rounding where it is above the dtype's bound and above ten times the largest distance of all earlier steps.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from samestep.text import counted
from samestep.verify.read import Digest, Run

_EPSILON = {
    "float64": 2.0**-52,
    "float32": 2.0**-23,
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
    "tf32": 2.0**-10,
}
_JUMP = 10.0
_CHAOS = 1e-2
_FACTS = {"steps", "uneven", "apart", "batch", "samples", "mode", "hyper"}


@dataclass(frozen=True)
class Difference:
    """One thing that a run has different from the first run."""

    kind: str
    step: int | None  # counted from 0
    rank: int | None  # None: all ranks
    name: str
    distance: float

    def __str__(self) -> str:
        where = "" if self.rank is None else f"rank {self.rank}, "
        what = f"gradient of {self.name}" if self.kind == "grad" else self.name
        return f"{self._when}{where}{what}"

    @property
    def _when(self) -> str:
        if self.step is None:
            return ""
        # Weights are recorded before the step, so they show what the step before did.
        done = self.step + (self.kind not in ("weights", "apart"))
        return f"step {done}, " if done else "before step 1, "


@dataclass(frozen=True)
class Trajectory:
    """How far two runs are apart; `largest` is the largest distance in the steps before `beyond`."""

    bits: Difference | None
    beyond: Difference | None
    largest: float


def follow(first: Run, other: Run) -> Trajectory:
    """The first difference in bits and the first beyond rounding between a run and the first run."""
    bound = max(_EPSILON.get(run.fact("precision"), _EPSILON["float32"]) for run in (first, other)) ** 0.75
    bits: Difference | None = None
    largest = 0.0
    for step in range(max(first.length, other.longest)):
        worst = 0.0
        for one in _differences(first, other, step):
            bits = bits or one
            if one.distance > max(bound, _JUMP * largest) or one.distance > _CHAOS:
                return Trajectory(bits, one, largest)
            worst = max(worst, one.distance)
        largest = max(largest, worst)
    return Trajectory(bits, None, largest)


def first_fact(first: Run, other: Run) -> Difference | None:
    """The first difference that rounding cannot cause: samples, a learning rate, the number of steps."""
    for step in range(max(first.length, other.longest)):
        for one in _differences(first, other, step):
            if one.kind in _FACTS:
                return one
    return None


def _differences(first: Run, other: Run, step: int) -> Iterator[Difference]:
    """The differences in one step, causes before effects."""
    if other.length <= step < other.longest:
        yield _uneven(other)
        return
    if step >= first.length or step >= other.length:
        yield Difference("steps", step, None, "number of steps", math.inf)
        return
    one, another = first.steps[step], other.steps[step]
    yield from _apart_ranks(other, step)
    yield from _tensors("weights", step, one.param, another.param, 1e-3)
    yield from _facts(first, other, step)
    yield from _tensors("buffer", step, one.buffer, another.buffer, 1e-2)
    scale = max(map(abs, first.losses[: step + 1]))
    if apart := _apart(first.losses[step], other.losses[step], scale):
        yield Difference("loss", step, None, "loss", apart)
    scale = max(total(one.grad) for one in first.steps[: step + 1])
    yield from _tensors("grad", step, one.grad, another.grad, 1.0, scale)


def _uneven(run: Run) -> Difference:
    """Names the ranks that took the fewest and the most steps."""
    took = [len(steps) for steps in run.ranks]
    few, most = took.index(min(took)), took.index(max(took))
    said = f"rank {few} took {counted(took[few], 'step')} and rank {most} {took[most]}"
    return Difference("uneven", None, None, said, math.inf)


def _apart_ranks(run: Run, step: int) -> Iterator[Difference]:
    for rank, steps in enumerate(run.ranks):
        for name, digest in steps[step].param.items():
            if digest.bits != run.steps[step].param.get(name, digest).bits:
                # A step that only some ranks take makes the weights differ too.
                is_even = run.longest == run.length
                yield Difference("apart", step, rank, name, math.inf) if is_even else _uneven(run)


def _facts(first: Run, other: Run, step: int) -> Iterator[Difference]:
    """What must be equal, not merely close."""
    one, another = first.steps[step], other.steps[step]
    if first.num_samples(step) != other.num_samples(step):
        yield Difference("batch", step, None, "samples of the batch", math.inf)
    known_by = "rows" if first.is_untouched else "samples"
    if first.each(known_by, step) != other.each(known_by, step):
        yield Difference("samples", step, None, "samples", math.inf)
    for rank, steps in enumerate(other.ranks):
        if steps[step].training != one.training and steps[step].parts:
            yield Difference("mode", step, rank, "training mode", math.inf)
    for rank, steps in enumerate(other.ranks[1:], 1):
        for name in _unlike(another.hyper, steps[step].hyper):
            yield Difference("hyper", step, rank, name, math.inf)
    for name in _unlike(one.hyper, another.hyper):
        yield Difference("hyper", step, None, name, math.inf)


def _tensors(
    kind: str,
    step: int,
    first: Mapping[str, Digest],
    other: Mapping[str, Digest],
    floor: float,
    scale: float | None = None,
) -> Iterator[Difference]:
    """Each tensor's distance over `scale`, or over its own norm, which counts as `floor` of the total at least."""
    least = floor * total(first)
    for name in [*first, *(name for name in other if name not in first)]:
        if name not in first or name not in other:
            yield Difference(kind, step, None, name, math.inf)
            continue
        a, b = first[name], other[name]
        if a.bits == b.bits and a.along == b.along:
            continue
        over = scale if scale is not None else max(a.norm, least)
        yield Difference(
            kind, step, None, name, max(_apart(a.norm, b.norm, over), _apart(a.along, b.along, over))
        )


def total(digests: Mapping[str, Digest]) -> float:
    """The norm of all tensors together."""
    return math.sqrt(math.fsum(digest.norm**2 for digest in digests.values() if math.isfinite(digest.norm)))


def _apart(a: float, b: float, scale: float) -> float:
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return abs(a - b) / scale if scale else math.inf


def _unlike(mine: Sequence[Mapping[str, object]], theirs: Sequence[Mapping[str, object]]) -> Iterator[str]:
    for a, b in zip(mine, theirs, strict=False):
        yield from (name for name in a if name in b and not _close(a[name], b[name]))


def _close(a: object, b: object) -> bool:
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_close, a, b))
    return isinstance(a, float) and isinstance(b, float) and math.isclose(a, b, rel_tol=1e-9)
