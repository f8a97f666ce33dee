"""Finds the first difference between two recorded runs: in bits, and beyond rounding.

Rounding starts at the last bit and grows slowly from step to step; a mistake makes a jump. Each tensor is judged by its
own noise: how far it is from itself in a run whose weights have other last bits. A distance is beyond rounding where it
is above the dtype's bound, above that noise, and above ten times the largest distance of all earlier steps. A gradient
as many times another as there are ranks is beyond rounding in any case.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from samestep.text import counted
from samestep.verify.read import EPSILON, Digest, Run, alike

_JUMP = 10.0
_NOISE = 30.0
_CHAOS = 1e-2
_FACTS = {"steps", "uneven", "apart", "batch", "samples", "mode", "hyper"}
SOFT = {"weights", "buffer", "loss", "grad"}


@dataclass(frozen=True)
class Difference:
    """One thing that a run has different from the first run."""

    kind: str
    step: int | None  # counted from 0
    rank: int | None  # None: all ranks
    name: str
    distance: float  # of a gradient, over the norm of all gradients
    own: float = 0.0  # over the tensor's own norm

    def __str__(self) -> str:
        where = "" if self.rank is None else f"rank {self.rank}, "
        what = f"gradient of {self.name}" if self.kind == "grad" else self.name
        return f"{self._when}{where}{what}"

    @property
    def key(self) -> tuple[str, str]:
        return self.kind, self.name

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
    also: list[Difference] = field(default_factory=list)  # what else is beyond rounding in that step


def follow(first: Run, other: Run, nudged: Run | None = None) -> Trajectory:
    """The first difference in bits and the first beyond rounding between a run and the first run.

    `nudged` is the first run from other last bits.
    """
    bound = max(EPSILON.get(run.fact("precision"), EPSILON["float32"]) for run in (first, other)) ** 0.75
    bits: Difference | None = None
    largest = furthest = 0.0
    noise: dict[tuple[str, str], float] = {}
    for step in range(max(first.length, other.longest)):
        if nudged is not None:
            for found in _differences(first, nudged, step):
                noise[found.key] = max(found.own, noise.get(found.key, 0.0))
        differences = list(_differences(first, other, step))
        bits = bits or next(iter(differences), None)
        beyond = [
            found
            for found in differences
            if _is_beyond(found, bound, noise.get(found.key, 0.0))
            and (found.own > _JUMP * furthest or found.own > _CHAOS)
        ] or list(_times_ranks(first, other, nudged, step))
        if beyond:
            return Trajectory(bits, beyond[0], largest, beyond)
        largest = max([largest, *(found.distance for found in differences)])
        # What is noise in one tensor must not excuse another.
        calm = [one.own for one in differences if noise.get(one.key, 0.0) <= bound]
        furthest = max([furthest, *calm])
    return Trajectory(bits, None, largest)


def _is_beyond(found: Difference, bound: float, noise: float) -> bool:
    """Whether rounding cannot have caused this; a gradient that is as small as rounding of the others is all noise."""
    return (found.kind != "grad" or found.distance > bound / 10) and found.own > max(bound, _NOISE * noise)


def first_fact(first: Run, other: Run) -> Difference | None:
    """The first difference that rounding cannot cause: samples, a learning rate, the number of steps."""
    for step in range(max(first.length, other.longest)):
        for found in _differences(first, other, step):
            if found.kind in _FACTS:
                return found
    return None


def _differences(first: Run, other: Run, step: int) -> Iterator[Difference]:
    """The differences in one step, causes before effects."""
    if other.length <= step < other.longest:
        yield _uneven(other)
        return
    if step >= first.length or step >= other.length:
        yield _fact("steps", step, None, "number of steps")
        return
    mine, theirs = first.steps[step], other.steps[step]
    yield from _apart_ranks(other, step)
    yield from _tensors("weights", step, mine.param, theirs.param, 1e-3)
    yield from _facts(first, other, step)
    yield from _tensors("buffer", step, mine.buffer, theirs.buffer, 1e-2)
    scale = max(map(abs, first.losses[: step + 1]))
    if apart := _apart(first.losses[step], other.losses[step], scale):
        yield Difference("loss", step, None, "loss", apart, apart)
    yield from _tensors("grad", step, mine.grad, theirs.grad, 0.0, total(mine.grad))


def _fact(kind: str, step: int | None, rank: int | None, name: str) -> Difference:
    return Difference(kind, step, rank, name, math.inf, math.inf)


def _times_ranks(first: Run, other: Run, nudged: Run | None, step: int) -> Iterator[Difference]:
    """Gradients that are as many times the first run's as there are ranks, or that part of them."""
    if step >= min(first.length, other.length) or first.size == other.size:
        return
    mine, theirs = total(first.steps[step].grad), total(other.steps[step].grad)
    ranks = max(first.size, other.size) / min(first.size, other.size)
    if not mine or not any(
        math.isclose(theirs / mine, factor, rel_tol=0.02) for factor in (ranks, 1 / ranks)
    ):
        return
    if nudged is None or step >= nudged.length or 0.8 < total(nudged.steps[step].grad) / mine < 1.25:
        name = max(first.steps[step].grad.items(), key=lambda item: item[1].norm)[0]
        yield Difference("grad", step, None, name, abs(theirs / mine - 1), math.inf)


def _uneven(run: Run) -> Difference:
    """Names the ranks that took the fewest and the most steps."""
    took = [len(steps) for steps in run.ranks]
    few, most = took.index(min(took)), took.index(max(took))
    return _fact(
        "uneven", None, None, f"rank {few} took {counted(took[few], 'step')} and rank {most} {took[most]}"
    )


def _apart_ranks(run: Run, step: int) -> Iterator[Difference]:
    for rank, steps in enumerate(run.ranks):
        for name, digest in steps[step].param.items():
            if digest.bits != run.steps[step].param.get(name, digest).bits:
                # A step that only some ranks take makes the weights differ too.
                yield _fact("apart", step, rank, name) if run.longest == run.length else _uneven(run)


def _facts(first: Run, other: Run, step: int) -> Iterator[Difference]:
    """What must be equal, not merely close."""
    mine, theirs = first.steps[step], other.steps[step]
    if first.num_samples(step) != other.num_samples(step):
        yield _fact("batch", step, None, "samples of the batch")
    if not _same_samples(first, other, step):
        yield _fact("samples", step, None, "samples")
    for rank, steps in enumerate(other.ranks):
        if steps[step].training != mine.training and steps[step].parts:
            yield _fact("mode", step, rank, "training mode")
    for rank, steps in enumerate(other.ranks[1:], 1):
        for name in _unlike(theirs.hyper, steps[step].hyper):
            yield _fact("hyper", step, rank, name)
    for name in _unlike(mine.hyper, theirs.hyper):
        yield _fact("hyper", step, None, name)


def _same_samples(first: Run, other: Run, step: int) -> bool:
    if first.is_untouched:
        whole = first.each("given", step)[0]
        return any(alike(whole, found) for found in other.each("given", step))
    return first.each("samples", step)[0] in other.each("samples", step) or (
        first.each("samples", step)[1] in other.each("samples", step)
    )


def _tensors(
    kind: str,
    step: int,
    first: Mapping[str, Digest],
    other: Mapping[str, Digest],
    floor: float,
    scale: float | None = None,
) -> Iterator[Difference]:
    """Each tensor's distance over its own norm, which counts as `floor` of the total at least, and over `scale`."""
    least = floor * total(first)
    for name in [*first, *(name for name in other if name not in first)]:
        if name not in first or name not in other:
            yield _fact(kind, step, None, name)
            continue
        a, b = first[name], other[name]
        if a.bits == b.bits and a.along == b.along:
            continue
        apart = max(_apart(a.norm, b.norm, 1.0), _apart(a.along, b.along, 1.0))
        over = max(a.norm, least)
        own = apart / over if over else math.inf
        yield Difference(kind, step, None, name, apart / scale if scale else own, own)


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
