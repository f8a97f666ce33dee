"""Finds numbers that a script prints or saves for one rank's share instead of for all ranks, by experiments.

A number belongs to one rank if the ranks print different numbers, or if it differs from the number at one process but
is the same again when every rank gets whole batches. Inside a training loop it is a progress line: only a remark.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import zip_longest

from samestep.verify.experiments import Experiments, Removed
from samestep.verify.read import NUMBER, Line, Run
from samestep.verify.trajectory import follow

_MEASURED = re.compile(r"\s*(?:[num]?s|sec|seconds?|min|h|[KMG]i?B|\S*/s)\b|m\s*\d+(?:\.\d+)?s\b|h\d+m")
_NAME = re.compile(r"\s+(?:min|h|s)\s*[:=]?\s*(?=[-+]?\d|nan|inf)|\s+min\s+(?=[^\W\d])")  # of the next number
_NO_VALUE = re.compile(r"torch\.Size\(\[[\d, ]*\]\)|\S+\.py:\d+")  # a shape, the place of a warning
_DIGITS = re.compile(r"\d+(?:\.\d+)?")
_CLOSE = 1e-5  # the relative distance that is always allowed
_LARGEST_TIMES = 20.0  # times the largest distance in the training
_TIMES_NOISE = 10.0  # times the distance of a run with other last bits
_TIMES_LINE = 3.0  # times the largest relative distance there of a number in the same line
_MOST_OF_LINE = 3e-2  # the largest relative distance that this allows
_SHARE = "use samestep.sum, samestep.mean or, for a value of each sample, samestep.gather"
_ON_ALL_RANKS = "; loop over the loader and call it on every rank, outside of `if rank == 0`"
_NOISE = (
    "{} prints other numbers, by as much as it prints others {} from changed last bits; see What rounding is in "
    "docs/verify.md"
)
_CHOICE = "the choice depends on one rank's share; decide by samestep.sum(correct) or samestep.mean(loss)"
_TOTAL = (
    "a number over all ranks that is not the serial script's: it counts samples unequally (take samestep.mean(loss) "
    "inside the loop, for its batch; divide samestep.sum(total) by samestep.sum(count)), takes them in another order "
    "(samestep.gather has the order of the samples), or is computed from a share's samples together, as a threshold, "
    "neighbours or batch statistics are (gather outputs and targets first)"
)


@dataclass(frozen=True)
class Printed:
    """A printed line with a number that belongs to one rank."""

    line: str
    verb: str
    shown: str
    instead: str
    is_remark: bool
    is_total: bool  # the same on all ranks, but not the serial script's
    is_on_rank_0: bool
    more: int = 0  # how many other kinds of lines this line of the script prints

    def __str__(self) -> str:
        text = f"{self.line} {self.verb} `{self.shown}` instead of `{self.instead}`"
        text += f" (and {self.more} more like it)" * bool(self.more)
        if self.verb == "saves":
            return f"{text}; {_CHOICE}"
        if self.is_total:
            return f"{text}; {_TOTAL}"
        why = "progress of one rank's share" if self.is_remark else "a value of one rank's share alone"
        return f"{text}; {why}; {_SHARE}{_ON_ALL_RANKS * self.is_on_rank_0}"


def compare_printed(
    experiments: Experiments, removed: Removed, size: int
) -> tuple[list[Printed], str | None]:
    """Lines that the script prints differently at this size, although it trains the same without the found causes,
    and a note on lines whose numbers are noise."""
    rest = tuple(name for name in removed if name != "shares")
    first, other = experiments.reference(rest), experiments.run(size, rest)
    if first.code:
        return [], None
    compared = experiments.compared(size, rest)
    is_same = rest == removed and compared.difference is None
    near = _Near()
    # a number of a share may differ by no more than its last digit, and by more where there is another share
    is_close = is_same and any(_differ_at_last(*pair[2:]) for pair in _pairs(first, other))
    further = [*_pairs(first, experiments.run(size + 1, rest))] if is_close else []

    def pairs() -> list[tuple[str, int, Line, Line]]:
        near.exact = set()
        near.exact = {kind for kind, _, line, now in further if near.unlike(kind, line, now)}
        return [pair for pair in _pairs(first, other) if not is_same or near.unlike(pair[0], *pair[2:])]

    if not pairs():
        return [], None
    near.learn(first, experiments.reference(rest, "again"), math.inf)
    noisy = []
    if is_same:
        nudged = experiments.reference(rest, "nudged")
        near.allow(_LARGEST_TIMES * follow(first, other, nudged).largest)
        noisy = pairs()
        near.learn(first, nudged, _TIMES_NOISE, _TIMES_LINE)
    noisy = [pair for pair in noisy if not near.unlike(pair[0], *pair[2:])]
    note = _NOISE.format(noisy[0][3].at, first.at) if noisy else None
    if not pairs():
        return [], note
    if first.fact("clock") and "clock" not in rest:  # durations are not numbers of the training
        return compare_printed(experiments, (*removed, "clock"), size)
    ways = (["world=*"], ["shares"], ["world=*", "shares"])
    alone, *shared = (experiments.run(size, (*rest, *way)) for way in ways)
    by_kind: dict[str, Printed] = {}
    for kind, at, line, now in pairs():
        is_own = _differs_between_ranks(kind, first, alone, near)
        is_of_share = is_same and not _has(alone, kind, at, line, near)
        is_right_with_shares = is_of_share and any(_has(run, kind, at, line, near) for run in shared)
        if (is_own or is_right_with_shares) and not _names_its_rank(kind, other):
            is_remark = now.inside and now.verb != "saves"
            is_on_rank_0 = not any(kind in lines for lines in other.printed[1:])
            texts = now.text.strip(), line.text.strip()
            shown = Printed(now.at, now.verb, *texts, is_remark, not is_own, is_on_rank_0)
            by_kind.setdefault(kind, shown)
    by_line: dict[tuple[str, bool], list[Printed]] = {}
    for printed in by_kind.values():
        by_line.setdefault((printed.line, printed.is_remark), []).append(printed)
    return [replace(printed, more=len(more)) for printed, *more in by_line.values()], note


class _Near:
    """The allowed distances between numbers in lines of each kind."""

    def __init__(self) -> None:
        self._near = _CLOSE  # relative to the number; learned distances are added
        self.exact = set[str]()  # kinds of lines whose last digits may not differ
        self._apart: dict[tuple[str, int], float] = {}
        self._of_lines: dict[str, float] = {}

    def allow(self, near: float) -> None:
        """Allow this distance relative to each number, if it is more than is allowed already."""
        self._near = max(self._near, near)

    def learn(self, first: Run, other: Run, times: float, times_line: float = 0.0) -> None:
        """Allow `times` the distances between two runs that train the same, and `times_line` the largest relative
        distance in a line: a median or a count is the same by chance where the numbers beside it are noise."""
        for kind, _, line, now in _pairs(first, other):
            for at, a, b in _numbers(line, now):
                if a != b:
                    apart = abs(float(a) - float(b))
                    part = min(_MOST_OF_LINE, times_line * apart / max(abs(float(a)), abs(float(b))))
                    self._apart[kind, at] = max(times * apart, self._apart.get((kind, at), 0.0))
                    self._of_lines[kind] = max(part, self._of_lines.get(kind, 0.0))

    def unlike(self, kind: str, line: Line, other: Line, near: float | None = None) -> bool:
        """Whether a number differs by more than is allowed."""
        part = max(self._near, self._of_lines.get(kind, 0.0)) if near is None else near
        return any(
            abs(float(a) - float(b))
            > _tolerance(a, b, part, kind in self.exact) + self._apart.get((kind, at), 0.0)
            for at, a, b in _numbers(line, other)
        )


def _pairs(first: Run, other: Run) -> Iterator[tuple[str, int, Line, Line]]:
    """Pairs of lines of both runs, by kind and index within the kind; for saved files also lines of only one run."""
    for kind, lines in first.printed[0].items():
        for at, (line, now) in enumerate(zip_longest(lines, other.printed[0].get(kind, []))):
            if line and now:
                yield kind, at, line, now
            elif kind.startswith("saves"):
                nothing = replace(line or now, text="nothing", inside=False)
                yield kind, at, line or nothing, now or nothing
                break


def _names_its_rank(kind: str, run: Run) -> bool:
    """Whether all lines of a kind contain their rank at the same position, also in a name such as `rank0.pt`."""
    form, places = _DIGITS.sub("#", kind), list[set[int]]()
    for rank, kinds in enumerate(run.printed):
        lines = [line for other in kinds if _DIGITS.sub("#", other) == form for line in kinds[other]]
        numbers = [_DIGITS.findall(line.text) for line in lines] or [[]]
        places += [{at for at, number in enumerate(found) if number == str(rank)} for found in numbers]
    return bool(set.intersection(*places))


def _differs_between_ranks(kind: str, first: Run, alone: Run, near: _Near) -> bool:
    """Whether the ranks, with equal weights, print different numbers."""
    lines = (kinds.get(kind, []) for kinds in (first.printed[0], *alone.printed))
    for line, mine, *others in zip(*lines, strict=False):
        agree = not any(near.unlike(kind, mine, theirs, 0.0) for theirs in others)
        if not agree and any(near.unlike(kind, line, theirs) for theirs in (mine, *others)):
            return True
    return False


def _has(run: Run, kind: str, at: int, line: Line, near: _Near) -> bool:
    """Whether this run prints the same line as the first run."""
    lines = run.printed[0].get(kind, [])
    return not run.code and len(lines) > at and not near.unlike(kind, line, lines[at])


def _numbers(line: Line, other: Line) -> Iterator[tuple[int, str, str]]:
    """The numbers of both lines by their place, without shapes, lines of code, durations, rates and sizes of memory."""
    counted = []
    for text in (_NO_VALUE.sub("", line.text), _NO_VALUE.sub("", other.text)):
        measured = _measured(text)
        counted.append([match[0] for match in NUMBER.finditer(text) if match.start() not in measured])
    for at, (a, b) in enumerate(zip(*counted, strict=False)):
        yield at, a, b


def _measured(text: str) -> set[int]:
    """Where durations, rates and sizes of memory begin. "max 3 min 1 s 2" has none: `min` names the number behind it;
    in "3 min 12 s" it is a unit, as that number has one."""
    measured = set[int]()
    for match in reversed([*NUMBER.finditer(text)]):
        name = _NAME.match(text, match.end())
        if _MEASURED.match(text, match.end()) and (not name or name.end() in measured):
            measured.add(match.start())
    return measured


def _differ_at_last(line: Line, other: Line) -> bool:
    """Whether a number differs by its last digit alone."""
    return any(0 < abs(float(a) - float(b)) <= _tolerance(a, b, 0.0) for _, a, b in _numbers(line, other))


def _tolerance(a: str, b: str, near: float, is_exact: bool = False) -> float:
    """The distance that rounding can make: the last printed digit of a fraction, plus `near` times the value."""
    last_digits = [10.0 ** int(Decimal(number).as_tuple().exponent) for number in (a, b)]
    is_fraction = any(letter in a + b for letter in ".eE") and not is_exact
    return 1.01 * max(last_digits) * is_fraction + near * max(abs(float(a)), abs(float(b)))
