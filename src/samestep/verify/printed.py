"""Finds what a script prints or saves for one rank's share instead of for all ranks, by experiments.

A number is one rank's own where the ranks print different ones, or where it is another than at one process and the same
again once every rank is given whole batches. Inside a loop over batches to train on it is a progress line: a remark.
"""

import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from samestep.verify.experiments import Experiments, Removed
from samestep.verify.read import Line, Run

_NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
_MEASURED = re.compile(r"\s*(?:[num]?s|sec|seconds?|min|h|[KMG]i?B|\S*/s)\b")
_SHAPE = re.compile(r"torch\.Size\(\[[\d, ]*\]\)")
_CLOSE = 1e-5
_LARGEST_TIMES = 20.0
_SHARE = "use samestep.sum or samestep.mean, which include every rank's share"
_TOTAL = (
    "a total that counts some samples more often than others; sum what each rank's share of samestep.loader gives, and "
    "divide by samestep.sum(count)"
)
_Kinds = dict[str, list[Line]]


@dataclass(frozen=True)
class Printed:
    """A line of which a number is one rank's own."""

    line: str
    shown: str
    instead: str
    is_remark: bool
    is_total: bool  # the same on all ranks, and not that of the serial script

    def __str__(self) -> str:
        if self.shown.startswith("saves "):
            return (
                f"{self.line} `{self.shown}` instead of `{self.instead}`; the choice depends on one rank's share; "
                "decide by samestep.sum(correct) or samestep.mean(loss)"
            )
        said = f"{self.line} prints `{self.shown}` instead of `{self.instead}`"
        if self.is_total:
            return f"{said}; {_TOTAL}"
        why = "progress of one rank's share" if self.is_remark else "a value of one rank's share alone"
        return f"{said}; {why}; {_SHARE}"


def compare_printed(experiments: Experiments, removed: Removed, size: int) -> list[Printed]:
    """What the script prints differently at this size although it trains alike, without the causes found so far."""
    rest = tuple(name for name in removed if name != "shares")
    first, other = experiments.reference(rest), experiments.run(size, rest)
    if first.code or other.code:
        return []
    compared = experiments.compared(size, rest)
    is_same = rest == removed and compared.difference is None
    near = max(_CLOSE, _LARGEST_TIMES * compared.largest) if is_same else _CLOSE
    pairs = [pair for pair in _pairs(first, other) if not is_same or _unlike(pair[2], pair[3], near)]
    if not pairs:
        return []
    if first.fact("clock") and "clock" not in rest:  # durations are no numbers of the training
        return compare_printed(experiments, (*removed, "clock"), size)
    noise = _noise(first, experiments.reference(rest, "again"))
    alone, *shared = (
        experiments.run(size, (*rest, *more)) for more in (["world=*"], ["shares"], ["world=*", "shares"])
    )
    found: dict[str, Printed] = {}
    for kind, at, line, now in pairs:
        ignored = noise.get(kind, set())
        shown = [_has(run, kind, at, line, near, ignored) for run in (alone, *shared)]
        is_right_with_shares = _unlike(line, now, near, ignored) and not shown[0] and any(shown)
        is_own = _differs_between_ranks(kind, first, alone, near, ignored)
        if (
            kind not in found
            and not _names_its_rank(kind, other)
            and (is_own or (is_same and is_right_with_shares))
        ):
            is_remark = now.inside and not now.text.startswith(("saves ", "writes "))
            found[kind] = Printed(now.at, now.text.strip(), line.text.strip(), is_remark, not is_own)
    return list(found.values())


def _pairs(first: Run, other: Run) -> Iterator[tuple[str, int, Line, Line]]:
    """Lines of both runs by kind and place among the lines of that kind; of a saved file also those of one run only."""
    ours, theirs = _by_kind(first.printed[0]), _by_kind(other.printed[0])
    for kind in ours:
        pairs = zip_longest(ours[kind], theirs.get(kind, []))
        for at, (line, now) in enumerate(pairs):
            if line and now:
                yield kind, at, line, now
            elif kind.startswith("saves"):
                there = line or now
                nothing = replace(there, text="saves nothing", inside=False)
                yield kind, at, line or nothing, now or nothing
                break


def _names_its_rank(kind: str, run: Run) -> bool:
    """Whether all lines of a kind have the number of their rank at one place."""
    ranks = [[_NUMBER.findall(line.text) for line in _by_kind(lines).get(kind, [])] for lines in run.printed]
    return all(ranks) and any(
        all(numbers[at] == str(rank) for rank, lines in enumerate(ranks) for numbers in lines)
        for at in range(len(ranks[0][0]))
    )


def _differs_between_ranks(kind: str, first: Run, alone: Run, near: float, ignored: set[int]) -> bool:
    """Whether the ranks, with equal weights, print different numbers."""
    lines = [_by_kind(printed).get(kind, []) for printed in alone.printed]
    expected = _by_kind(first.printed[0]).get(kind, [])
    for line, mine, *others in zip(expected, *lines, strict=False):
        agree = not any(_unlike(mine, theirs, 0.0, ignored) for theirs in others)
        if not agree and any(_unlike(line, theirs, near, ignored) for theirs in (mine, *others)):
            return True
    return False


def _has(run: Run, kind: str, at: int, line: Line, near: float, ignored: set[int]) -> bool:
    """Whether this run prints what the first run does."""
    lines = _by_kind(run.printed[0]).get(kind, [])
    return not run.code and len(lines) > at and not _unlike(line, lines[at], near, ignored)


def _noise(first: Run, again: Run) -> dict[str, set[int]]:
    """Which numbers of the lines of a kind are others in a second run like the first."""
    mine, theirs = _by_kind(first.printed[0]), _by_kind(again.printed[0])
    return {
        kind: {at for pair in zip(mine[kind], theirs.get(kind, []), strict=False) for at in _unlike(*pair)}
        for kind in mine
    }


def _by_kind(lines: Sequence[Line]) -> _Kinds:
    """Lines by kind: lines that differ only in their numbers, and the blanks beside them, are of one kind."""
    found: _Kinds = {}
    for line in lines:
        if _NUMBER.search(line.text):
            found.setdefault("".join(_NUMBER.sub("#", line.text).split()), []).append(line)
    return found


def _unlike(line: Line, other: Line, near: float = 0.0, ignored: Container[int] = ()) -> list[int]:
    """Which numbers differ, by their place in the line."""
    pairs = enumerate(zip(_numbers(line.text), _numbers(other.text), strict=False))
    return [
        at for at, (a, b) in pairs if at not in ignored and abs(float(a) - float(b)) > _tolerance(a, b, near)
    ]


def _numbers(line: str) -> Iterator[str]:
    """The numbers in a line, without shapes, durations, rates and amounts of memory."""
    line = _SHAPE.sub("", line)
    for match in _NUMBER.finditer(line):
        if not _MEASURED.match(line, match.end()):
            yield match[0]


def _tolerance(a: str, b: str, near: float) -> float:
    """What rounding may change: the last printed digit of a fraction, and `near` of the value."""
    is_integer = not any(letter in a + b for letter in ".eE")
    unit = 0.0 if is_integer else 1.01 * max(_unit(a), _unit(b))
    return unit + near * max(abs(float(a)), abs(float(b)))


def _unit(number: str) -> float:
    """The value of 1 in the last printed digit."""
    digits, _, exponent = number.lower().partition("e")
    return float(10.0 ** (int(exponent or 0) - len(digits.partition(".")[2])))
