"""Finds what a script prints or saves for one rank's share instead of for all ranks, by experiments.

A number is one rank's own where the ranks print different ones, or where it is another than at one process and the same
again once every rank is given whole batches. Inside a loop over batches to train on it is a progress line: a remark.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from samestep.verify.read import Line, Run
from samestep.verify.search import Removed, Search

_NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
_MEASURED = re.compile(r"\s*(?:[num]?s|sec|seconds?|min|h|[KMG]i?B|\S*/s)\b")
_CLOSE = 1e-5
_LARGEST_TIMES = 20.0
_Kinds = dict[str, list[Line]]


@dataclass(frozen=True)
class Printed:
    """A line of which a number is one rank's own."""

    line: str
    shown: str
    instead: str
    is_remark: bool

    def __str__(self) -> str:
        what = "saved" if self.shown.startswith("saves ") else "printed"
        said = (
            f"{self.line} {'' if what == 'saved' else 'prints '}`{self.shown}` instead of `{self.instead}`; "
        )
        if what == "saved":
            return (
                said
                + "the choice depends on one rank's share; decide by samestep.sum(correct) or samestep.mean(loss)"
            )
        why = "progress of one rank's share" if self.is_remark else "a value of one rank's share alone"
        return f"{said}{why}; use samestep.sum or samestep.mean, which include every rank's share"


def compare_printed(search: Search, size: int) -> list[Printed]:
    """What the script prints differently at this size although it trains alike, without the causes found so far."""
    removed = tuple(name for name in search.removed if name != "shares")
    first, other = search.reference(removed), search.run(size, removed)
    if first.code or other.code:
        return []
    is_same = removed == search.removed and search.compared(size, removed).difference is None
    largest = search.compared(size, removed).path.largest if is_same else 0.0
    near = max(_CLOSE, _LARGEST_TIMES * largest)
    candidates = list(_unlike_lines(first, other, near)) if is_same else list(_numbered(first, other))
    if not candidates:
        return []
    again = _by_kind(search.reference(removed, "again").printed[0])
    alone = search.run(size, _with(removed, "world=*"))
    shared = search.run(size, _with(removed, "shares"))
    both = search.run(size, _with(_with(removed, "world=*"), "shares"))
    found: list[tuple[str, Printed]] = []
    for kind, at, line, now in candidates:
        if not _is_stable(kind, at, line, again) or kind in {one for one, _ in found}:
            continue
        if _is_own(kind, first, other, alone, near) or (
            is_same
            and not _has(alone, kind, at, line, near)
            and any(_has(run, kind, at, line, near) for run in (shared, both))
        ):
            is_remark = now.inside and not now.text.startswith(("saves ", "writes "))
            found.append((kind, Printed(now.at, now.text.strip(), line.text.strip(), is_remark)))
    return [one for _, one in found]


def _with(removed: Removed, name: str) -> Removed:
    """With one more cause removed; every line includes each."""
    kept = tuple(one for one in removed if not (name == "world=*" and one.startswith("world=")))
    return (*kept, name)


def _unlike_lines(first: Run, other: Run, near: float) -> Iterator[tuple[str, int, Line, Line]]:
    """The lines whose numbers differ, by kind and place among the lines of that kind."""
    for kind, at, line, now in _numbered(first, other):
        if _unlike(line.text, now.text, near):
            yield kind, at, line, now


def _numbered(first: Run, other: Run) -> Iterator[tuple[str, int, Line, Line]]:
    ours, theirs = _by_kind(first.printed[0]), _by_kind(other.printed[0])
    for kind in ours:
        lines = theirs.get(kind, [])
        for at, (line, now) in enumerate(zip(ours[kind], lines, strict=False)):
            yield kind, at, line, now
        if len(lines) != len(ours[kind]) and kind.startswith("saves "):
            longer = ours[kind] if len(ours[kind]) > len(lines) else lines
            missing = Line("saves nothing", longer[-1].at, longer[-1].step, inside=False)
            at = min(len(lines), len(ours[kind]))
            yield (
                kind,
                at,
                (ours[kind] + [missing] * len(lines))[at],
                (lines + [missing] * len(ours[kind]))[at],
            )


def _is_stable(kind: str, at: int, line: Line, again: _Kinds) -> bool:
    """Whether a second run like the first prints this too."""
    lines = again.get(kind, [])
    return len(lines) <= at or not _unlike(line.text, lines[at].text)


def _is_own(kind: str, first: Run, other: Run, alone: Run, near: float) -> bool:
    """Whether the ranks, with equal weights, print different numbers where none of them says that it is one's own."""
    normal = [_by_kind(lines).get(kind, []) for lines in other.printed]
    for ranks in zip(*normal, strict=False):
        if all(str(rank) in _NUMBER.findall(line.text) for rank, line in enumerate(ranks)):
            return False  # it names the rank
    lines = [_by_kind(printed).get(kind, []) for printed in alone.printed]
    whole = _by_kind(first.printed[0]).get(kind, [])
    for expected, *same_line in zip(whole, *lines, strict=False):
        agree = not any(_unlike(same_line[0].text, line.text) for line in same_line[1:])
        if not agree and any(_unlike(expected.text, line.text, near) for line in same_line):
            return True
    return False


def _has(run: Run, kind: str, at: int, line: Line, near: float) -> bool:
    """Whether this run prints what the first run does."""
    lines = _by_kind(run.printed[0]).get(kind, [])
    return not run.code and len(lines) > at and not _unlike(line.text, lines[at].text, near)


def _by_kind(lines: Sequence[Line]) -> _Kinds:
    """Lines by kind: lines that differ only in their numbers are of one kind."""
    found: _Kinds = {}
    for line in lines:
        if _NUMBER.search(line.text):
            found.setdefault(_NUMBER.sub("#", line.text), []).append(line)
    return found


def _unlike(text: str, other: str, near: float = 0.0) -> bool:
    pairs = zip(_numbers(text), _numbers(other), strict=False)
    return any(abs(float(a) - float(b)) > _tolerance(a, b, near) for a, b in pairs)


def _numbers(line: str) -> Iterator[str]:
    """The numbers in a line, without durations, rates and amounts of memory."""
    for match in _NUMBER.finditer(line):
        if not _MEASURED.match(line, match.end()):
            yield match[0]


def _tolerance(a: str, b: str, near: float) -> float:
    """What rounding may change: the last printed digit of a fraction, and `near` of the value."""
    is_whole = not any(letter in a + b for letter in ".eE")
    unit = 0.0 if is_whole else 1.01 * max(_unit(a), _unit(b))
    return unit + near * max(abs(float(a)), abs(float(b)))


def _unit(number: str) -> float:
    """The value of 1 in the last printed digit."""
    digits, _, exponent = number.lower().partition("e")
    return float(10.0 ** (int(exponent or 0) - len(digits.partition(".")[2])))
