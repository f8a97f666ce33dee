"""Finds what a script prints or saves for one rank's share instead of for all ranks, by experiments.

A number or a word belongs to one rank if the ranks print different ones, or if it differs from that at one process but
is the same again when every rank gets whole batches. Inside a training loop it is a progress line: only a remark.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from decimal import Decimal

from samestep.verify.experiments import Experiments, Removed
from samestep.verify.lines import COUNT, Line, numbers_of, pairs, words_apart
from samestep.verify.read import Run
from samestep.verify.trajectory import follow

_DIGITS = re.compile(r"\d+(?:\.\d+)?")
_CALM = 1e-3  # the largest distance in the training at which rounding chooses no other words
_CLOSE = 1e-5  # the relative distance that is always allowed
_LARGEST_TIMES = 20.0  # times the largest distance in the training
_TIMES_NOISE = 10.0  # times the distance of a run with other last bits
_TIMES_LINE = 3.0  # times the largest relative distance there of a number in the same line
_TIMES_CLOSE = 2e-2  # how near to N times a number is, which means of unequal shares add up to
_MOST_OF_LINE = 3e-2  # the largest relative distance that this allows
_SHARE = "use samestep.sum, samestep.mean or, for a value of each sample, samestep.gather"
_ON_ALL_RANKS = "; loop over the loader and call it on every rank, outside of `if rank == 0`"
_NOISE = (
    "{} prints other numbers, by as much as it prints others {} from changed last bits; see What rounding is in "
    "docs/verify.md"
)
_CHOICE = "the choice depends on one rank's share; decide by samestep.sum(correct) or samestep.mean(loss)"
_TOTAL = (
    "a value that all ranks have and that is not the serial script's: it counts samples unequally (take "
    "samestep.mean(loss) inside the loop, for its batch; divide samestep.sum(total) by samestep.sum(count)), takes "
    "them in another order (samestep.gather has the order of the samples), is of one rank's share (sent to all, or "
    "alike on them by chance), or is computed from a share's samples together, as a threshold, neighbours or batch "
    "statistics are (gather outputs and targets first)"
)
_TIMES = (
    "a number is {} times that of 1 process: means of the ranks are added up, or a number that all ranks have; take "
    "samestep.mean of means, and samestep.sum once, of what each rank counts"
)
_EACH_WRITES = "; each rank writes a file of this name: write it on rank 0, from what samestep.gather returns"


@dataclass(frozen=True)
class Printed:
    """A printed line with a number or a word that belongs to one rank."""

    line: str
    verb: str
    shown: str
    instead: str
    is_remark: bool
    is_total: bool  # the same on all ranks, but not the serial script's
    others: int  # the largest number of such lines on another rank
    times: int = 1  # how many times the first run's its numbers are, if they are an integer times those
    more: int = 0  # how many other kinds of lines this line of the script prints

    def __str__(self) -> str:
        text = f"{self.line} {self.verb} `{self.shown}` instead of `{self.instead}`"
        text += f" (and {self.more} more like it)" * bool(self.more)
        if self.verb == "saves":
            return f"{text}; {_CHOICE}"
        if self.is_total:
            return f"{text}; {_TIMES.format(self.times) if self.times > 1 else _TOTAL}"
        why = "progress of one rank's share" if self.is_remark else "a value of one rank's share alone"
        where = _ON_ALL_RANKS if not self.others else _EACH_WRITES if self.verb == "writes" else ""
        return f"{text}; {why}; {_SHARE}{where}"


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
    is_close = is_same and any(_differ_at_last(line, now) for _, line, now in _pairs(first, other))
    further = [*_pairs(first, experiments.run(size + 1, rest))] if is_close else []

    def unlike() -> list[tuple[int | str, Line, Line]]:
        near.exact = set()
        near.exact = {line.kind for _, line, now in further if near.has_other_numbers(line, now)}
        return [pair for pair in _pairs(first, other) if not is_same or near.unlike(*pair[1:])]

    if not unlike():
        return [], None
    near.learn(first, experiments.reference(rest, "again"), math.inf)
    noisy = []
    if is_same:
        nudged = experiments.reference(rest, "nudged")
        near.allow(follow(first, other, nudged).largest)
        noisy = [pair for pair in unlike() if near.has_other_numbers(*pair[1:])]
        near.learn(first, nudged, _TIMES_NOISE, _TIMES_LINE)
    noisy = [pair for pair in noisy if not near.unlike(*pair[1:])]
    note = _NOISE.format(noisy[0][2].at, first.at) if noisy else None
    found = unlike()
    if not found:
        return [], note
    # durations are not numbers of the training, nor is the order of a set
    for name, is_suspect in ("clock", bool(first.fact("clock"))), ("hashes", near.has_another_order(found)):
        if is_suspect and name not in rest:
            return compare_printed(experiments, (*removed, name), size)
    ways = (["world=*"], ["shares"], ["world=*", "shares"])
    alone, *shared = (experiments.run(size, (*rest, *way)) for way in ways)
    own = _differing_between_ranks(first, alone, near)
    have_alone, *have_shared = (_having(first, run, near) for run in (alone, *shared))
    by_kind: dict[str, Printed] = {}
    for key, line, now in found:
        is_own = line.kind in own
        is_of_share = is_same and not have_alone(key, line)
        is_decided = near.is_calm or near.has_other_numbers(line, now)  # rounding may choose other words
        is_right_with_shares = is_of_share and is_decided and any(have(key, line) for have in have_shared)
        if (is_own or is_right_with_shares) and not _names_its_rank(now, other):
            is_remark = now.inside and now.verb != "saves"
            others = max(len(lines.get(now.place, ())) for lines in other.printed[1:])
            texts = now.text.strip(), line.text.strip()
            # rank 0 may have the first run's number by chance
            texts = own[line.kind] if is_own and texts[0] == texts[1] else texts
            times = size if _is_times(size, line, now) else 1
            shown = Printed(now.at, now.verb, *texts, is_remark, not is_own, others, times)
            by_kind.setdefault(line.kind, shown)
    return _by_line(by_kind.values()), note


def _by_line(found: Iterable[Printed]) -> list[Printed]:
    by_line = defaultdict[tuple[str, bool], list[Printed]](list)
    for printed in found:
        by_line[printed.line, printed.is_remark].append(printed)
    return [replace(printed, more=len(more)) for printed, *more in by_line.values()]


class _Near:
    """The allowed distances between numbers in lines of each kind, and the words that may be others."""

    def __init__(self) -> None:
        self._near = _CLOSE  # relative to the number; learned distances are added
        self.exact = set[str]()  # kinds of lines whose last digits may not differ
        self.is_calm = True  # whether rounding is too small to choose other words
        self._apart: dict[tuple[str, int], float] = {}
        self._of_lines: dict[str, float] = {}
        self._words = defaultdict[tuple[str, str], set[int]](set)

    def allow(self, largest: float) -> None:
        """Allow as much, relative to each number, as this largest distance in the training may make."""
        self._near = max(self._near, _LARGEST_TIMES * largest)
        self.is_calm = largest <= _CALM

    def learn(self, first: Run, other: Run, times: float, times_line: float = 0.0) -> None:
        """Allow `times` the distances between two runs that train the same, and `times_line` the largest relative
        distance in a line: a median or a count is the same by chance where the numbers beside it are noise."""
        for _, line, now in _pairs(first, other):
            self._words[line.verb, line.at] |= words_apart(line, now)
            for at, a, b in numbers_of(line, now):
                if a != b:
                    apart = abs(float(a) - float(b))
                    part = min(_MOST_OF_LINE, times_line * apart / max(abs(float(a)), abs(float(b))))
                    self._apart[line.kind, at] = max(times * apart, self._apart.get((line.kind, at), 0.0))
                    self._of_lines[line.kind] = max(part, self._of_lines.get(line.kind, 0.0))

    def unlike(self, line: Line, other: Line, near: float | None = None, of: Line | None = None) -> bool:
        """Whether a word differs, or a number by more than is allowed in lines as `of`, the first run's."""
        return self._has_other_words(line, other, of or line) or self.has_other_numbers(line, other, near, of)

    def has_other_numbers(
        self, line: Line, other: Line, near: float | None = None, of: Line | None = None
    ) -> bool:
        kind = (of or line).kind
        part = max(self._near, self._of_lines.get(kind, 0.0)) if near is None else near
        return any(
            abs(float(a) - float(b))
            > _tolerance(a, b, part, kind in self.exact) + self._apart.get((kind, at), 0.0)
            for at, a, b in numbers_of(line, other)
        )

    def _has_other_words(self, line: Line, other: Line, of: Line) -> bool:
        apart, noise = words_apart(line, other), self._words[of.verb, of.at]
        return bool(apart and not noise) if COUNT in apart | noise else not apart <= noise

    def has_another_order(self, unlike: Iterable[tuple[int | str, Line, Line]]) -> bool:
        """Whether a line of the script prints the same words in another order, as those of a set."""
        texts = defaultdict[str, tuple[list[str], list[str]]](lambda: ([], []))
        for _, line, now in unlike:
            if self._has_other_words(line, now, line):
                for text, words in zip(texts[line.at], (line.words, now.words), strict=True):
                    text += sorted("".join(words))
        return any(sorted(mine) == sorted(theirs) for mine, theirs in texts.values())


def _pairs(first: Run, other: Run, rank: int = 0) -> Iterator[tuple[int | str, Line, Line]]:
    """Pairs of lines of rank 0 of the first run and a rank of the other run."""
    return pairs(first.printed[0], other.printed[rank], first.is_untouched == other.is_untouched)


def _names_its_rank(now: Line, run: Run) -> bool:
    """Whether all lines of this kind contain their rank at the same position, also in a name such as `rank0.pt`."""
    form, lines = _form(now), [kinds.get(now.place, []) for kinds in run.printed]
    is_even = len({*map(len, lines)}) == 1
    at_form = [at for at, line in enumerate(lines[0]) if _form(line) == form]
    places = list[set[int]]()
    for rank, printed in enumerate(lines):
        alike = (
            [printed[at] for at in at_form] if is_even else [line for line in printed if _form(line) == form]
        )
        numbers = [_DIGITS.findall(line.text) for line in alike] or [[]]
        places += [{at for at, number in enumerate(found) if number == str(rank)} for found in numbers]
    return bool(set.intersection(*places))


def _form(line: Line) -> str:
    return _DIGITS.sub("#", line.kind)


def _is_times(size: int, line: Line, now: Line) -> bool:
    """Whether the numbers that differ are all `size` times those of the first run."""
    pairs = [(float(a), float(b)) for _, a, b in numbers_of(line, now) if a != b]
    return bool(pairs) and all(math.isclose(b, size * a, rel_tol=_TIMES_CLOSE) for a, b in pairs)


def _differing_between_ranks(first: Run, alone: Run, near: _Near) -> dict[str, tuple[str, str]]:
    """The kinds of lines that ranks with equal weights print differently, each with such a line and the first run's."""
    own, of_rank_0 = dict[str, tuple[str, str]](), {key: now for key, _, now in _pairs(first, alone)}
    for rank in range(1, alone.size):
        for key, line, theirs in _pairs(first, alone, rank):
            mine = of_rank_0.get(key, theirs)
            if alone.code and (mine.is_missing or theirs.is_missing):  # it ended before this line
                continue
            is_first = not near.unlike(line, mine) and not near.unlike(line, theirs)
            if not is_first and near.unlike(mine, theirs, 0.0, line):
                other = theirs if near.unlike(line, theirs) else mine
                own.setdefault(line.kind, (other.text.strip(), line.text.strip()))
    return own


def _having(first: Run, run: Run, near: _Near) -> Callable[[int | str, Line], bool]:
    """Whether a run prints this line as the first run, or as the first run does not print it."""
    prints = {key: now for key, _, now in _pairs(first, run)}

    def has(key: int | str, line: Line) -> bool:
        same = not near.unlike(line, prints[key]) if key in prints else isinstance(key, str)
        return same and not run.code

    return has


def _differ_at_last(line: Line, other: Line) -> bool:
    """Whether a number differs by its last digit alone."""
    return any(0 < abs(float(a) - float(b)) <= _tolerance(a, b, 0.0) for _, a, b in numbers_of(line, other))


def _tolerance(a: str, b: str, near: float, is_exact: bool = False) -> float:
    """The distance that rounding can make: the last printed digit of a fraction, plus `near` times the value."""
    largest = max(abs(float(a)), abs(float(b)))
    if not math.isfinite(largest):  # also a digest such as 5e7312
        return 0.0
    exponents = [int(Decimal(number).as_tuple().exponent) for number in (a, b) if float(number)]
    last_digit = max((10.0**exponent for exponent in exponents), default=0.0)
    is_fraction = any(letter in a + b for letter in ".eE") and not is_exact
    return 1.01 * last_digit * is_fraction + near * largest
