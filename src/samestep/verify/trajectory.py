"""Finds the first difference between two recorded runs: in bits, and beyond rounding.

Rounding starts at the last bit and grows slowly from step to step; a mistake makes a jump. Each tensor is judged by its
own noise: its distance from a run whose weights have other last bits. A distance is beyond rounding if it is above the
dtype's bound, above that noise, and above ten times the largest distance of all earlier steps. A gradient that differs
by a factor of the number of ranks is always beyond rounding.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from samestep.text import counted
from samestep.verify.read import EPSILON, Digests, Run, are_given_alike

_JUMP = 10.0  # a mistake exceeds the largest earlier distance by this factor
_NOISE = 30.0  # a mistake exceeds a tensor's noise by this factor
_CHAOS = 1e-2  # above this, a distance needs no jump
# terms of a gradient that cancel out leave rounding of up to the bound of all gradients, divided by this
_CANCELLED = 4.0
_ADDED = 0.1  # if gradients of added losses are as much closer than the losses, these have equal terms
_TERMS = 0.1  # the size of a loss's terms, relative to gradient norm times weight norm
_OF_NORMS = {"max_norm": 1e-2, "clip_value": 1e-2}  # a script may compute these from earlier gradients
SOFT = ("weights", "buffer", "loss", "grad")  # the kinds of differences that rounding can make
# The order within a step: causes before effects.
KINDS = ("failed", "uneven", "steps", "apart", "weights", "batch", "samples", "mode", "hyper", *SOFT[1:])


@dataclass(frozen=True)
class Difference:
    """A single difference between a run and the first run."""

    kind: str
    step: int | None  # counted from 0; weights and buffers are those before the step
    rank: int | None  # None: all ranks
    name: str
    distance: float = math.inf  # relative to the tensor; of a gradient, to the norm of all gradients
    own: float = math.inf  # relative to the tensor's own norm

    def __str__(self) -> str:
        # Weights are recorded before a step, so they show the effect of the previous step.
        done = (self.step or 0) + (self.kind not in ("weights", "apart"))
        when = "" if self.step is None else f"step {done}, " if done else "before step 1, "
        where = "" if self.rank is None else f"rank {self.rank}, "
        return f"{when}{where}{'gradient of ' * (self.kind == 'grad')}{self.name}"

    @property
    def key(self) -> tuple[str, str]:
        return self.kind, self.name


@dataclass(frozen=True)
class Compared:
    """A run compared with the first run."""

    first: Run
    run: Run
    difference: Difference | None = None  # the first difference beyond rounding
    also: Sequence[Difference] = ()  # all differences beyond rounding in that step
    bits: Difference | None = None  # the first difference of all
    largest: float = 0.0  # the largest distance in earlier steps
    note: str | None = None

    @property
    def verdict(self) -> str:
        if self.run.code:
            return "failed"
        return "different" if self.difference else "rounding" if self.bits else "bits"

    @property
    def kind(self) -> str | None:
        return self.difference.kind if self.difference else None

    @property
    def step(self) -> int:
        return (self.difference.step if self.difference else None) or 0

    @property
    def is_in_a_step(self) -> bool:
        return self.step < min(self.first.length, self.run.length)

    @property
    def distance(self) -> float:
        found = self.difference
        if found is None:
            return self.largest
        return found.own if math.isfinite(found.own) else found.distance

    @property
    def place(self) -> tuple[float, int]:
        """The place of the difference in the training, for comparisons."""
        if self.difference is None:
            return math.inf, 0
        steps = {"failed": -1, "uneven": self.run.length}
        return steps.get(self.difference.kind, self.step), KINDS.index(self.difference.kind)


def follow(first: Run, other: Run, nudged: Run | None = None) -> Compared:
    """Compare a run with the first run; `nudged` is the first run with other last bits, which shows the noise."""
    bound = max(EPSILON.get(run.fact("precision"), EPSILON["float32"]) for run in (first, other)) ** 0.75
    bits: Difference | None = None
    largest = furthest = 0.0
    noise: dict[tuple[str, str], float] = {}
    for step in range(max(first.length, other.longest) + 1):
        for change in _differences(first, nudged, step) if nudged is not None else ():
            noise[change.key] = max(change.own, noise.get(change.key, 0.0))
        differences = list(_differences(first, other, step))
        bits = bits or next(iter(differences), None)
        beyond = [
            change
            for change in differences
            if _is_beyond(change, bound, noise.get(change.key, 0.0))
            and (change.own > _JUMP * furthest or change.own > _CHAOS)
        ] or list(_times_ranks(first, other, nudged, step))
        if beyond:
            return Compared(first, other, beyond[0], beyond, bits, largest)
        # A noisy tensor must not excuse other tensors, nor printed numbers.
        calm = [change for change in differences if noise.get(change.key, 0.0) <= bound]
        largest = max([largest, *(change.distance for change in calm)])
        furthest = max([furthest, *(change.own for change in calm)])
    return Compared(first, other, None, (), bits, largest)


def is_noise(compared: Compared, nudged: Run, until: int) -> bool:
    """Whether the first run with other last bits differs as much up to the step `until`, in the same number."""
    found = compared.difference
    assert found is not None
    steps = range(min(until, compared.first.length) + 1)
    changes = (change for step in steps for change in _differences(compared.first, nudged, step))
    return found.own <= _NOISE * max(
        (change.own for change in changes if change.key == found.key), default=0.0
    )


def first_fact(first: Run, other: Run) -> Difference | None:
    """The first difference that rounding cannot cause: samples, a learning rate, the number of steps."""
    steps = range(max(first.length, other.longest) + 1)
    facts = (facts for step in steps for facts in _differences(first, other, step) if facts.kind not in SOFT)
    return next(facts, None)


def _is_beyond(change: Difference, bound: float, noise: float) -> bool:
    """Whether rounding cannot have caused this; a gradient as small as the rounding of the others is noise."""
    if change.kind == "grad" and change.distance <= bound / _CANCELLED:
        return False
    return change.own > max(bound, _NOISE * noise)


def _differences(first: Run, other: Run, step: int) -> Iterator[Difference]:
    """The differences in a step, or after the last step, causes before effects."""
    if step < min(first.length, other.length):
        yield from _in_the_step(first, other, step)
    elif other.length < other.longest:
        yield _uneven(other)
    elif first.length != other.length:
        yield Difference("steps", step, None, "number of steps")
    else:
        yield from _apart_ranks(other, step)
        yield from _tensors("weights", step, first.fact("param") or {}, other.fact("param") or {}, 1e-3)
        yield from _tensors("buffer", step, first.fact("buffer") or {}, other.fact("buffer") or {}, 1e-2)


def _in_the_step(first: Run, other: Run, step: int) -> Iterator[Difference]:
    mine, theirs = first.steps[step], other.steps[step]
    yield from _apart_ranks(other, step)
    yield from _tensors("weights", step, mine.param, theirs.param, 1e-3)
    yield from _facts(first, other, step)
    yield from _tensors("buffer", step, mine.buffer, theirs.buffer, 1e-2)
    # terms of a loss may cancel out, which leaves only rounding; the gradient shows how large the terms are
    terms = _TERMS * total(mine.grad) * total(mine.param)
    scale = max(terms, *map(abs, first.losses[: step + 1]))
    gradients = [*_tensors("grad", step, mine.grad, theirs.grad, 0.0, total(mine.grad))]
    largest = max((gradient.distance for gradient in gradients), default=0.0)
    apart = _apart(first.losses[step], other.losses[step], scale)
    # with loss="sum" a penalty on the weights is in each rank's loss, and its gradient counts once
    is_added = any(part.get("adds") for part in theirs.parts) and not other.fact("made_sums")
    if apart and not (is_added and largest < apart * _ADDED):
        yield Difference("loss", step, None, "loss", apart, apart)
    yield from gradients


def _times_ranks(first: Run, other: Run, nudged: Run | None, step: int) -> Iterator[Difference]:
    """A difference if the gradients are the first run's times the number of ranks, or divided by it."""
    if step >= min(first.length, other.length) or first.size == other.size:
        return
    mine, theirs = total(first.steps[step].grad), total(other.steps[step].grad)
    ranks = other.size / first.size
    if not mine or not any(math.isclose(theirs / mine, part, rel_tol=0.02) for part in (ranks, 1 / ranks)):
        return
    if nudged is None or step >= nudged.length or 0.8 < total(nudged.steps[step].grad) / mine < 1.25:
        name = max(first.steps[step].grad.items(), key=lambda item: item[1].norm)[0]
        yield Difference("grad", step, None, name, abs(theirs / mine - 1))


def _uneven(run: Run) -> Difference:
    """A difference that names the ranks with the fewest and the most steps."""
    took = [len(steps) for steps in run.ranks]
    few, most = took.index(min(took)), took.index(max(took))
    sentence = f"rank {few} took {counted(took[few], 'step')} and rank {most} {took[most]}"
    return Difference("uneven", None, None, sentence)


def _apart_ranks(run: Run, step: int) -> Iterator[Difference]:
    """Parameters that differ between ranks before this step, or after the last step."""
    params = [facts.get("param", {}) for facts in run.facts]
    if step < run.length:
        params = [steps[step].param for steps in run.ranks]
    for rank, param in enumerate(params):
        for name, digest in param.items():
            if digest.bits != params[0].get(name, digest).bits:
                # a step that only some ranks take also makes the weights differ
                is_even = run.longest == run.length
                yield Difference("apart", step, rank, name) if is_even else _uneven(run)


def _facts(first: Run, other: Run, step: int) -> Iterator[Difference]:
    """Differences in facts that must be equal, not only close."""
    mine, theirs = first.steps[step], other.steps[step]
    # rows of the untouched script may be words or nodes instead of samples
    is_by_rows = first.is_untouched and first.batch("given", step)
    if not is_by_rows and first.num_samples(step) != other.num_samples(step):
        is_even = other.longest == other.length
        yield Difference("batch", step, None, "samples of the batch") if is_even else _uneven(other)
    if first.is_untouched:
        is_alike = are_given_alike(first, other, step)
    else:
        is_alike = first.batch("samples", step) == other.batch("samples", step)
    if not is_alike:
        yield Difference("samples", step, None, "samples")
    for rank, steps in enumerate(other.ranks):
        if steps[step].training != mine.training and steps[step].parts:
            yield Difference("mode", step, rank, "training mode")
    for rank, steps in enumerate(other.ranks[1:], 1):
        for name in _unlike(theirs.hyper, steps[step].hyper):
            yield Difference("hyper", step, rank, name)
    for name in _unlike(mine.hyper, theirs.hyper):
        yield Difference("hyper", step, None, name)


def _tensors(
    kind: str, step: int, first: Digests, other: Digests, floor: float, scale: float | None = None
) -> Iterator[Difference]:
    """Each tensor's distance relative to its norm, which is at least `floor` of the total norm, and to `scale`."""
    least = floor * total(first)
    for name in first | other:
        if name not in first or name not in other:
            yield Difference(kind, step, None, name)
            continue
        a, b = first[name], other[name]
        if a.bits == b.bits and a.along == b.along:
            continue
        apart = max(_apart(a.norm, b.norm, 1.0), _apart(a.along, b.along, 1.0))
        over = max(a.norm, least)
        own = apart / over if over else math.inf
        yield Difference(kind, step, None, name, apart / scale if scale else own, own)


def total(digests: Digests) -> float:
    return math.sqrt(math.fsum(digest.norm**2 for digest in digests.values() if math.isfinite(digest.norm)))


def _apart(a: float, b: float, scale: float) -> float:
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return abs(a - b) / scale if scale else math.inf


def _unlike(
    mine: Sequence[dict[str, list[float]]], theirs: Sequence[dict[str, list[float]]]
) -> Iterator[str]:
    for a, b in zip(mine, theirs, strict=False):
        for name in (name for name in a if name in b):
            ours, others, near = a[name], b[name], _OF_NORMS.get(name, 1e-9)
            if len(ours) != len(others) or not all(map(partial(math.isclose, rel_tol=near), ours, others)):
                yield name
