"""Totals of many ranks as bytes: numbers are added exactly, arrays in the widest type of their kind.

Exact sums do not depend on the order of their terms; arrays are added in a fixed tree over ranks (Group.total).
"""

import json
from collections.abc import Iterator, Sequence
from fractions import Fraction
from math import inf, isfinite
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np

_NOTHING = [
    1,
    0,
    1,
    0.0,
]  # whether only integers were added, the sum as a fraction, and what is not finite of it


class Sums(NamedTuple):
    """Some numbers and some arrays; an array that no rank has counted yet has no bytes."""

    numbers: list[list[Any]]
    arrays: list[tuple[str, bytes]]


def number(value: Any) -> list[Any]:
    """A number as a term of a sum; None is no term."""
    if value is None:
        return _NOTHING
    if isinstance(value, Integral):
        return [1, int(value), 1, 0.0]
    return [0, *value.as_integer_ratio(), 0.0] if isfinite(value := float(value)) else [0, 0, 1, value]


def value_of(total: Sequence[Any]) -> int | float:
    """The nearest float, or the integer where all terms were integers."""
    are_integers, above, below, odd = total
    if are_integers:
        return int(above)
    if odd:
        return float(odd)
    try:
        return float(above / below)
    except OverflowError:
        return inf if above > 0 else -inf


def pack(sums: Sums) -> bytes:
    head = json.dumps([sums.numbers, [[kind, len(data)] for kind, data in sums.arrays]]).encode()
    return b"\n".join((head, b"".join(data for _, data in sums.arrays)))


def unpack(packed: bytes) -> Sums:
    head, _, rest = packed.partition(b"\n")
    numbers, kinds = json.loads(head)

    def arrays() -> Iterator[tuple[str, bytes]]:
        at = 0
        for kind, size in kinds:
            yield kind, rest[at : at + size]
            at += size

    return Sums(numbers, list(arrays()))


def add(left: bytes, right: bytes) -> bytes:
    """The sums of both, as bytes again."""
    one, other = unpack(left), unpack(right)
    numbers = [_plus(a, b) for a, b in zip(one.numbers, other.numbers, strict=True)]
    arrays = [
        (kind, (np.frombuffer(a, kind) + np.frombuffer(b, kind)).tobytes() if a and b else a or b)
        for (kind, a), (_, b) in zip(one.arrays, other.arrays, strict=True)
    ]
    return pack(Sums(numbers, arrays))


def _plus(a: Sequence[Any], b: Sequence[Any]) -> list[Any]:
    total = Fraction(a[1], a[2]) + Fraction(b[1], b[2])
    return [a[0] & b[0], total.numerator, total.denominator, a[3] + b[3]]
