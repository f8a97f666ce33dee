"""Values as bytes that are added over ranks: numbers exactly, arrays in the widest type of their kind.

An exact sum does not depend on the order of its terms; arrays are added in a fixed tree over ranks (Group.total).
"""

from collections.abc import Sequence
from math import inf, isfinite
from numbers import Integral
from typing import Any

import numpy as np

from samestep.text import type_of
from samestep.train.group.census import pack, unpack

_UNIT = 1 << 1074  # every float is an integer divided by this


def number(value: Any) -> list[Any]:
    """A number as a term of a sum: whether it is an integer, its units, and its value if it is not finite."""
    # None adds nothing.
    if value is None or isinstance(value, Integral):
        return [1, int(value or 0) * _UNIT, 0.0]
    if not isfinite(value := float(value)):
        return [0, 0, value]
    above, below = value.as_integer_ratio()
    return [0, above * (_UNIT // below), 0.0]


def value_of(total: Sequence[Any]) -> int | float:
    """The nearest float, or the integer where all terms were integers."""
    are_integers, units, odd = total
    if are_integers:
        return int(units // _UNIT)
    try:
        return float(odd or units / _UNIT)
    except OverflowError:
        return inf if units > 0 else -inf


def add(left: bytes, right: bytes) -> bytes:
    """The sum of two packed terms; an array without bytes adds nothing."""
    (numbers, kinds), arrays = unpack(left)
    (other_numbers, _), other_arrays = unpack(right)
    added = [[a[0] & b[0], a[1] + b[1], a[2] + b[2]] for a, b in zip(numbers, other_numbers, strict=True)]
    totals = [
        (np.frombuffer(a, kind) + np.frombuffer(b, kind)).tobytes() if a and b else a or b
        for kind, a, b in zip(kinds, arrays, other_arrays, strict=True)
    ]
    return pack([added, kinds], totals)


def written(value: Any) -> Any:
    """A value for JSON; a value that JSON does not have becomes a list that begins with its type."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    kind = type(value)
    if kind is bytes:
        return ["bytes", value.hex()]
    if kind is complex:
        return ["complex", value.real, value.imag]
    if kind is np.ndarray and value.dtype.kind in "biufcSU":
        return ["ndarray", value.dtype.str, written(value.shape), value.tobytes().hex()]
    if kind in (list, tuple, set, dict):
        return [kind.__name__, *map(written, value.items() if kind is dict else value)]
    raise TypeError(f"{type_of(value)}; use numbers, text, arrays and lists, tuples or dicts of them")


def read(node: Any) -> Any:
    """The value that `written` was given."""
    if not isinstance(node, list):
        return node
    kind, parts = node[0], [read(part) for part in node[1:]]
    if kind in ("bytes", "complex"):
        return bytes.fromhex(*parts) if kind == "bytes" else complex(*parts)
    if kind == "ndarray":
        return np.ndarray(parts[1], parts[0], bytearray.fromhex(parts[2]))
    return {"list": list, "tuple": tuple, "set": set, "dict": dict}[kind](parts)
