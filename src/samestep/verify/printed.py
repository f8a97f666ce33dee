"""Finds the numbers that two runs print differently although both train alike."""

import re
from collections.abc import Callable, Iterator, Sequence

from samestep.verify.read import Run
from samestep.verify.trajectory import Difference

_NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
_MEASURED = re.compile(r"\s*(?:[num]?s|sec|seconds?|min|h|[KMG]i?B|\S*/s)\b")
_NEAR = 0.02
_MOST_LINES = 10_000


def printed_otherwise(first: Run, other: Run, same_bits: bool, again: Callable[[], Run]) -> Difference | None:
    """The first number that differs, in the lines of a kind that `again`, a second first run, prints alike.

    Runs that differ in bits may print slightly different numbers. Where ranks print different numbers, though, each
    of them is one rank's own, however close they are.
    """
    ours, theirs = _by_kind(first.printed[0]), _by_kind(other.printed[0])
    rest = [_by_kind(lines) for lines in other.printed[1:]]
    for kind in [kind for kind in ours if kind in theirs]:
        for at, (line, now) in enumerate(zip(ours[kind], theirs[kind], strict=False)):
            same_line = [lines[kind][at] for lines in rest if len(lines.get(kind, ())) > at]
            agree = not any(_unlike(now, line_of_rank) for line_of_rank in same_line)
            near = 0.0 if same_bits or not agree else _NEAR
            if _unlike(line, now, near, (first.size, other.size)):
                if any(map(_unlike, ours[kind], _by_kind(again().printed[0]).get(kind, []))):
                    break
                shown = f"`{now.strip()}` instead of `{line.strip()}`"
                return Difference("printed", None, 0, shown, float("inf"))
    return None


def _by_kind(lines: Sequence[str]) -> dict[str, list[str]]:
    """Lines by kind: lines that differ only in their numbers are of one kind."""
    found: dict[str, list[str]] = {}
    for line in lines[:_MOST_LINES]:
        if "\r" not in line and not line.startswith("samestep:") and _NUMBER.search(line):
            found.setdefault(_NUMBER.sub("#", line), []).append(line)
    return found


def _unlike(line: str, other: str, near: float = 0.0, sizes: tuple[int, int] = (1, 1)) -> bool:
    return any(not _alike(a, b, near, sizes) for a, b in zip(_numbers(line), _numbers(other), strict=False))


def _numbers(line: str) -> Iterator[str]:
    """The numbers in a line, without durations, rates and amounts of memory."""
    for match in _NUMBER.finditer(line):
        if not _MEASURED.match(line, match.end()):
            yield match[0]


def _alike(a: str, b: str, near: float, sizes: tuple[int, int]) -> bool:
    x, y = float(a), float(b)
    unit = max(_unit(a), _unit(b))
    if "." not in a + b and sizes[0] != sizes[1]:
        # A script may print how many processes it has, or how many samples each of them gets.
        whole, part = (x, y) if sizes[0] < sizes[1] else (y, x)
        size = max(sizes) // min(sizes)
        if (x, y) == sizes or part in (whole // size, -(-whole // size)):
            return x == y or part != 0
    return abs(x - y) <= 1.01 * unit + near * max(abs(x), abs(y))


def _unit(number: str) -> float:
    """The value of 1 in the last printed digit."""
    digits, _, exponent = number.lower().partition("e")
    return float(10.0 ** (int(exponent or 0) - len(digits.partition(".")[2])))
