"""Compares two states: what differs, by how much, and whether that is more than rounding."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import torch
from torch import Tensor

from samestep.compare.gap import Gap, inexact, measure, numbers
from samestep.compare.names import Flat, aligned
from samestep.text import counted, size

Verdict = Literal["same", "tolerance", "rounding", "different"]

_TEXT = 30
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_BATCHNORM = (
    "Only BatchNorm statistics differ: each rank computes them from its own share of the batch, and DDP keeps "
    "rank 0's. Use replicate(model, sync_batchnorm=True), or steps with exact=True, for "
    "statistics that do not depend on the number of processes."
)


@dataclass(frozen=True, kw_only=True)
class Difference(Gap):
    """A tensor or value whose bits differ between the states."""

    name: str
    kind: Literal["missing", "shape", "dtype", "value"]
    a: str | None  # float32[3, 4], or a single value; None if it is missing
    b: str | None
    size: int = 1
    exact: bool = True  # a counter, a flag, a text: no tolerance applies
    rounding: bool = False

    @property
    def layer(self) -> str:
        return "" if self.name.startswith("[") else self.name.rpartition(".")[0]

    @property
    def is_statistic(self) -> bool:
        return self.name.rpartition(".")[2] in _STATISTICS and self.kind == "value"

    def within(self, tolerance: float | None) -> bool:
        """Whether it is within the tolerance; without a tolerance, within rounding."""
        if tolerance is None:
            return self.rounding
        return self.relative == 0 or (not self.exact and self.relative <= tolerance)


@dataclass(frozen=True)
class Comparison:
    """All differences between two states, in the order of the first state."""

    differences: tuple[Difference, ...]
    tensors: int  # in the first state
    values: int  # in the first state, beside its tensors
    bytes: int
    names: tuple[str, str]
    tolerance: float | None
    notes: tuple[str, ...]

    @property
    def beyond(self) -> list[Difference]:
        return [item for item in self.differences if not item.within(self.tolerance)]

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
    def worst(self) -> Difference | None:
        return max(self.differences, key=lambda item: item.relative, default=None)

    @property
    def cause(self) -> str | None:
        """The cause of the differences, if only one is possible; otherwise None."""
        return _BATCHNORM if self.beyond and all(item.is_statistic for item in self.beyond) else None

    @property
    def contents(self) -> str:
        """The content of the first state: `62 tensors and 5 values, 1.2 MB`."""
        values = f" and {counted(self.values, 'value')}" if self.values else ""
        return f"{counted(self.tensors, 'tensor')}{values}, {size(self.bytes)}"

    def __str__(self) -> str:
        if self.worst is None:
            return f"same to the bit ({self.contents})"
        if self.verdict == "different":
            return f"different: {'; '.join(self._parts())}"
        if self.worst.relative == 0 and self.tolerance is None:
            return f"same values, not the same bits: the sign of zero differs in {self.worst.name}"
        within = "to rounding" if self.tolerance is None else f"within {self.tolerance:g}"
        return (
            f"same {within}: largest relative difference {amount(self.worst.relative)} in {self.worst.name}"
        )

    def _parts(self) -> Iterator[str]:
        beyond = self.beyond
        if changed := [item for item in beyond if item.kind == "value"]:
            worst = max(changed, key=lambda item: item.relative)
            only = "only BatchNorm statistics, " if self.cause else ""
            total = f"{self.tensors + self.values} tensors{' and values' if self.values else ''}"
            most = "most in " if len(changed) > 1 else ""
            relative = f"relative {amount(worst.relative, worst.nans)}"
            by = f"{worst.a} and {worst.b}" if worst.size == 1 else relative
            yield f"{only}{len(changed)} of {total}, {most}{worst.name} ({by})"
        for kind in ("dtype", "shape"):
            if odd := [item.name for item in beyond if item.kind == kind]:
                yield f"{len(odd)} of another {kind} ({_some(odd)})"
        missing = [item for item in beyond if item.kind == "missing"]
        for side, name in enumerate(self.names):
            if there := [item.name for item in missing if (item.a, item.b)[side] is not None]:
                yield f"{len(there)} only in {name} ({_some(there)})"


def compare(
    a: object, b: object, *, tolerance: float | None = None, names: tuple[str, str] = ("A", "B")
) -> Comparison:
    """Compares two states of tensors, numbers and text, nested or flat; sentences use their `names`."""
    left, right, notes = aligned(a, b, names)
    # a plain number, as a best loss, was computed from the tensors
    is_single = any(isinstance(each, Tensor) and each.dtype == torch.float32 for each in left.values())
    of_plain = torch.finfo(torch.float32).eps if is_single else 0.0
    differences = [
        difference for name in left | right if (difference := _difference(name, left, right, of_plain))
    ]
    odd = [difference.name for difference in differences if difference.kind == "dtype"]
    if tolerance is not None and odd:
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


def amount(number: float, nans: int = 0) -> str:
    """A difference in at most seven characters."""
    return "NaN" if nans else f"{number:.1e}" if number and math.isfinite(number) else f"{number:g}"


def _difference(name: str, left: Flat, right: Flat, of_plain: float) -> Difference | None:
    if name in left and name in right:
        return _unlike(name, left[name], right[name], of_plain)
    a, b = (_text(state[name]) if name in state else None for state in (left, right))
    return Difference(name=name, kind="missing", a=a, b=b)


def _unlike(name: str, left: object, right: object, of_plain: float) -> Difference | None:
    a, b = numbers(left), numbers(right)
    if a is None or b is None:
        is_same = a is b and left == right
        if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)) and len(left) == len(right):
            is_same = not any(_unlike(name, *pair, of_plain) for pair in zip(left, right, strict=True))
        return None if is_same else Difference(name=name, kind="value", a=_text(left), b=_text(right))
    if a.shape != b.shape:
        shapes = str(list(a.shape)), str(list(b.shape))
        return Difference(name=name, kind="shape", a=shapes[0], b=shapes[1], size=a.numel(), elements=0)
    gap = measure(a, b)
    dtypes = (_dtype(left, a), _dtype(right, b))
    is_same_dtype = dtypes[0] == dtypes[1]
    if is_same_dtype and not gap.elements:
        return None
    shown = (_text(left, a), _text(right, b)) if is_same_dtype else dtypes
    exact = not (inexact(a) or inexact(b))
    own = 0.0 if exact else torch.finfo(a.dtype).eps
    epsilon = own if isinstance(left, Tensor) else max(own, of_plain)
    return Difference(
        name=name,
        kind="value" if is_same_dtype else "dtype",
        a=shown[0],
        b=shown[1],
        size=a.numel(),
        exact=exact,
        # A few steps of training amplify the last bit: 6e-6 in float32, 2e-12 in float64, 3e-2 in bfloat16.
        rounding=is_same_dtype and not exact and gap.relative <= epsilon**0.75,
        **asdict(gap),
    )


def _text(value: object, numbers: Tensor | None = None) -> str:
    """A single value, or a tensor's dtype and shape."""
    if numbers is not None and numbers.numel() == 1:
        number = numbers.item()
        is_short = isinstance(number, float) and numbers.dtype != torch.float64
        return f"{number:.9g}" if is_short else repr(number)
    if isinstance(value, Tensor):
        return f"{_dtype(value, value)}{list(value.shape)}"
    text = repr(value)
    return text if len(text) <= _TEXT else f"{text[: _TEXT - 1]}…"


def _dtype(value: object, numbers: Tensor) -> str:
    """The dtype in the file, which may be a packed form of the numbers."""
    return str((value if isinstance(value, Tensor) else numbers).dtype).removeprefix("torch.")


def _some(names: Sequence[str]) -> str:
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]
