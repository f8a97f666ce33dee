"""Says what differs between two states, by how much, and whether that is more than rounding."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from samestep.compare.gap import inexact, measure, numbers
from samestep.compare.names import flatten, inner_level
from samestep.text import counted, size

Verdict = Literal["same", "tolerance", "rounding", "different"]

_TEXT = 30
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_BATCHNORM = (
    "Only BatchNorm statistics differ: each rank computes them from its own share of the batch, and DDP keeps "
    "rank 0's. Use replicate(model, sync_batchnorm=True), or steps with exact=True, for "
    "statistics that do not depend on the number of processes."
)


@dataclass(frozen=True)
class Difference:
    """A tensor or value whose bits differ between the states."""

    name: str
    kind: Literal["missing", "shape", "dtype", "value"]
    a: str | None  # float32[3, 4], or the value where it is a single one; None where it is missing
    b: str | None
    size: int = 1
    elements: int = 1
    absolute: float = math.inf
    relative: float = math.inf  # the largest absolute difference over the largest finite value of both
    bits: int = 0
    nans: int = 0  # elements that are NaN on one side only
    exact: bool = True  # no tolerance applies: a counter, a flag, a text
    rounding: bool = False

    @property
    def layer(self) -> str:
        return "" if self.name.startswith("[") else self.name.rpartition(".")[0]

    @property
    def batchnorm(self) -> bool:
        return self.name.rpartition(".")[2] in _STATISTICS and self.kind == "value"

    @property
    def sign_of_zero(self) -> bool:
        """Equal values whose bits differ."""
        return self.kind == "value" and self.absolute == 0

    def within(self, tolerance: float) -> bool:
        return self.relative == 0 or (not self.exact and self.relative <= tolerance)


@dataclass(frozen=True)
class Comparison:
    """What differs between two states, in the order of the first."""

    differences: tuple[Difference, ...]
    tensors: int  # in the first state
    values: int  # in the first state, beside its tensors
    bytes: int
    names: tuple[str, str]
    tolerance: float | None
    notes: tuple[str, ...]

    @cached_property
    def beyond(self) -> tuple[Difference, ...]:
        """The differences larger than the tolerance, or than rounding where none was given."""
        if self.tolerance is None:
            return tuple(d for d in self.differences if not d.rounding)
        return tuple(d for d in self.differences if not d.within(self.tolerance))

    @property
    def verdict(self) -> Verdict:
        if not self.differences:
            return "same"
        if self.beyond:
            return "different"
        return "rounding" if self.tolerance is None else "tolerance"

    @property
    def equal(self) -> bool:
        return self.verdict in ("same", "tolerance")

    @property
    def first(self) -> Difference | None:
        return self.differences[0] if self.differences else None

    @property
    def worst(self) -> Difference | None:
        return max(self.differences, key=lambda d: d.relative, default=None)

    @property
    def cause(self) -> str | None:
        """Why they differ, where only one cause is possible."""
        return _BATCHNORM if self.beyond and all(d.batchnorm for d in self.beyond) else None

    @property
    def contents(self) -> str:
        """What the first state holds: 62 tensors and 5 values, 1.2 MB."""
        values = f" and {counted(self.values, 'value')}" if self.values else ""
        return f"{counted(self.tensors, 'tensor')}{values}, {size(self.bytes)}"

    def __str__(self) -> str:
        if self.worst is None:
            return f"same to the bit ({self.contents})"
        largest = f"largest relative difference {amount(self.worst.relative)} in {self.worst.name}"
        if self.verdict == "tolerance":
            return f"same within {self.tolerance:g}: {largest}"
        if self.verdict == "rounding" and self.worst.sign_of_zero:
            return f"same values, not the same bits: the sign of zero differs in {self.worst.name}"
        if self.verdict == "rounding":
            return f"same to rounding: {largest}"
        return f"different: {'; '.join(self._parts())}"

    def _parts(self) -> Iterator[str]:
        if changed := [d for d in self.beyond if d.kind == "value"]:
            worst = max(changed, key=lambda d: d.relative)
            only = "only BatchNorm statistics, " if self.cause else ""
            by = (
                f"{worst.a} and {worst.b}"
                if worst.size == 1
                else f"relative {amount(worst.relative, worst.nans)}"
            )
            total = f"{self.tensors + self.values} tensors{' and values' if self.values else ''}"
            most = "most in " if len(changed) > 1 else ""
            yield f"{only}{len(changed)} of {total}, {most}{worst.name} ({by})"
        for kind in ("dtype", "shape"):
            if odd := [d for d in self.beyond if d.kind == kind]:
                yield f"{len(odd)} of another {kind} ({_some([d.name for d in odd])})"
        for side, name in enumerate(self.names):
            if missing := [d for d in self.beyond if d.kind == "missing" and (d.a, d.b)[side] is not None]:
                yield f"{len(missing)} only in {name} ({_some([d.name for d in missing])})"


def compare(
    a: object, b: object, *, tolerance: float | None = None, names: tuple[str, str] = ("A", "B")
) -> Comparison:
    """Compares two states of tensors, numbers and text, nested or flat; sentences use their `names`."""
    left, right, notes = _aligned(a, b, names)
    differences, nans = [], []
    for name in [*left, *(name for name in right if name not in left)]:
        if name in left and name in right:
            difference, both_nan = _difference(name, left[name], right[name])
            nans += [name] if both_nan else []
        else:
            there = _text(left.get(name, right.get(name)))
            difference = Difference(name, "missing", *((there, None) if name in left else (None, there)))
        differences += [difference] if difference else []
    if nans:
        notes.append(f"NaN at the same place in both counts as equal: {_some(nans)}")
    if zeros := [d.name for d in differences if d.sign_of_zero]:
        notes.append(f"0.0 and -0.0 are equal values of different bits: {_some(zeros)}")
    if tolerance is not None and (odd := [d.name for d in differences if d.kind == "dtype"]):
        notes.append(f"dtypes differ; only the values are compared with the tolerance: {_some(odd)}")
    tensors = [value for value in left.values() if isinstance(value, Tensor)]
    return Comparison(
        tuple(differences),
        tensors=len(tensors),
        values=len(left) - len(tensors),
        bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors),
        names=names,
        tolerance=tolerance,
        notes=tuple(notes),
    )


def _aligned(
    a: object, b: object, names: tuple[str, str]
) -> tuple[dict[str, object], dict[str, object], list[str]]:
    """Both states by plain names, from the level where their names agree, and notes on what was left out."""
    (left, stripped), (right, also) = flatten(a), flatten(b)
    prefixes = " and ".join(f"`{prefix}`" for prefix in sorted(stripped | also, reverse=True))
    notes = [f"names are compared without {prefixes}"] if prefixes else []
    states = [left, right]
    for side in (0, 1):
        if level := inner_level(states[side], states[1 - side]):
            inner = (name for name in states[side] if name.startswith(level))
            states[side] = {name.removeprefix(level): states[side][name] for name in inner}
            notes.append(f"of {names[side]} only `{level}` is compared; {names[1 - side]} has no such level")
    return states[0], states[1], notes


def amount(number: float, nans: int = 0) -> str:
    """A difference in at most seven characters."""
    return "NaN" if nans else f"{number:.1e}" if number and math.isfinite(number) else f"{number:g}"


def _difference(name: str, left: object, right: object) -> tuple[Difference | None, bool]:
    """How two values differ, if they do, and whether a NaN stands at the same place in both."""
    a, b = numbers(left), numbers(right)
    if a is None or b is None:
        same, shared_nans = a is b and left == right, False
        if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)) and len(left) == len(right):
            each = [_difference(name, *pair) for pair in zip(left, right, strict=True)]
            same = not any(difference for difference, _ in each)
            shared_nans = any(nan for _, nan in each)
        return (None if same else Difference(name, "value", _text(left), _text(right))), shared_nans
    if a.shape != b.shape:
        return Difference(name, "shape", str(list(a.shape)), str(list(b.shape)), a.numel(), 0), False
    gap = measure(a, b)
    dtypes = (_dtype(left, a), _dtype(right, b))
    alike = dtypes[0] == dtypes[1]
    if alike and not gap.elements:
        return None, gap.shared_nans
    exact = not (inexact(a) or inexact(b))
    found = Difference(
        name,
        "value" if alike else "dtype",
        *((_text(left, a), _text(right, b)) if alike else dtypes),
        size=a.numel(),
        elements=gap.elements,
        absolute=gap.absolute,
        relative=gap.relative,
        bits=gap.bits,
        nans=gap.nans,
        exact=exact,
        # A few steps of training amplify the last bit: 6e-6 in float32, 2e-12 in float64, 3e-2 in bfloat16.
        rounding=alike and not exact and gap.relative <= torch.finfo(a.dtype).eps ** 0.75,
    )
    return found, gap.shared_nans


def _text(value: object, numbers: Tensor | None = None) -> str:
    """A single value, or a tensor's dtype and shape."""
    if numbers is not None and numbers.numel() == 1:
        number = numbers.item()
        short = isinstance(number, float) and numbers.dtype != torch.float64
        return f"{number:.9g}" if short else repr(number)
    if isinstance(value, Tensor):
        return f"{_dtype(value, value)}{list(value.shape)}"
    text = repr(value)
    return text if len(text) <= _TEXT else f"{text[: _TEXT - 1]}…"


def _dtype(value: object, numbers: Tensor) -> str:
    """The dtype in the file, which may be a packed form of the numbers."""
    return str((value if isinstance(value, Tensor) else numbers).dtype).removeprefix("torch.")


def _some(names: Sequence[str]) -> str:
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]
