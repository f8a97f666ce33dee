"""The lines that a run printed, wrote or saved: their words, their numbers, and the pairs of two runs."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest

# "12ab34" and "3e641a" are names, and "1h30m" is none
_HEX = r"(?!\d+e\d\d?\b)(?=\d*[a-f])[\da-f]{4,}\b"
_NUMBER = re.compile(
    rf"(?<![\w.])(?!{_HEX})[-+]?\d++(?:\.\d++|\.(?=[eE][-+]?\d))?(?:[eE][-+]?\d++)?(?!(?!h\d+m|m\d)[A-Za-z_]+\d)"
)
_MEASURED = re.compile(
    r"\s*(?:[num]?s|sec|seconds?|min|h|[KMG]i?B|\S*/s)\b|m\s*\d+(?:\.\d+)?s\b|h\d+m(?:\d+s)?"
)
_NAME = re.compile(r"\s+(?:min|h|s)\s*[:=]?\s*(?=[-+]?\d|nan|inf)|\s+min\s+(?=[^\W\d])")  # of the next number
_NO_VALUE = re.compile(r"torch\.Size\(\[[\d, ]*\]\)|\S+\.py:\d+")  # a shape, the place of a warning
_DIGITS = re.compile(r"\d+")
_NOTHING = "nothing"  # stands for a line that a run does not print
_FAR = 50  # how many lines further a line with other words is looked for
COUNT = -1  # stands for the number of words

Lines = Mapping[str, Sequence["Line"]]  # by place


@dataclass(frozen=True)
class Line:
    """A line that a rank printed, wrote or saved, with its place, and whether it is inside a training loop."""

    verb: str
    text: str
    at: str
    inside: bool

    @property
    def into(self) -> str:
        """The verb and the file without digits, such as of an epoch or a rank."""
        file = {"writes": self.text.partition(": ")[0], "saves": self.text.partition(" after step ")[0]}
        return f"{self.verb} {_DIGITS.sub('#', file.get(self.verb, ''))}"

    @property
    def place(self) -> str:
        return f"{self.into} {self.at}"

    @property
    def is_missing(self) -> bool:
        return self.text == _NOTHING

    @cached_property
    def kind(self) -> str:
        """The verb and the words, with # for each number."""
        return " ".join((self.verb, *self.words))

    @cached_property
    def words(self) -> tuple[str, ...]:
        text = _NO_VALUE.sub("", self.text)
        for start, end in reversed(_measured(text).items()):
            text = text[:start] + text[end:]
        return tuple(re.findall(r"#|[^\s#]+", re.sub(_NUMBER.pattern + r"\.?", " # ", text)))

    @cached_property
    def numbers(self) -> list[str]:
        """The numbers without shapes, lines of code, durations, rates and sizes of memory."""
        text = _NO_VALUE.sub("", self.text)
        measured = _measured(text)
        return [match[0] for match in _NUMBER.finditer(text) if match.start() not in measured]


def pairs(first: Lines, other: Lines, by_place: bool = True) -> Iterator[tuple[int | str, Line, Line]]:
    """Pairs of lines of two runs from the same place, each with a key of the first; a line that only one of them has
    is paired with `nothing` once for each place. Without places, as for two scripts, by verb and file."""
    if not by_place:
        first, other = _by_file(first), _by_file(other)
    for place in {**first, **other}:
        mine, theirs = first.get(place, ()), other.get(place, ())
        is_by_order = len(mine) == len(theirs) or place.startswith("saves")
        for line, now in zip_longest(mine, theirs) if is_by_order else _by_kind(mine, theirs):
            if line and now:
                yield id(line), line, now
            elif some := line or now:
                nothing = replace(some, text=_NOTHING)
                yield id(line) if line else place, line or nothing, now or nothing
                break


def words_apart(line: Line, other: Line) -> set[int]:
    """The places of unlike words; COUNT if the numbers of words are not the same."""
    if len(line.words) != len(other.words):
        return {COUNT}
    return {at for at, (a, b) in enumerate(zip(line.words, other.words, strict=True)) if a != b}


def numbers_of(line: Line, other: Line) -> Iterator[tuple[int, str, str]]:
    """The numbers of both lines by their place, if they stand at the same places."""
    if [word == "#" for word in line.words] == [word == "#" for word in other.words]:
        for at, (a, b) in enumerate(zip(line.numbers, other.numbers, strict=False)):
            yield at, a, b


def _by_file(lines: Lines) -> dict[str, list[Line]]:
    found = defaultdict[str, list[Line]](list)
    for line in (line for group in lines.values() for line in group):
        found[line.into].append(line)
    return found


def _by_kind(mine: Sequence[Line], theirs: Sequence[Line]) -> Iterator[tuple[Line | None, Line | None]]:
    """Pairs of equal kind, then of those that are left: as many on both sides, or lines of one side alone, or pairs
    that share half of their words."""
    waiting = defaultdict[str, list[Line]](list)
    for now in reversed(theirs):
        waiting[now.kind].append(now)
    left = []
    for line in mine:
        if waiting[line.kind]:
            yield line, waiting[line.kind].pop()
        else:
            left.append(line)
    others = {id(now) for group in waiting.values() for now in group}
    further = [now for now in theirs if id(now) in others]
    if len(left) == len(further) or not left or not further:
        yield from zip_longest(left, further)
        return
    start = 0
    for line in left:
        near = (at for at, now in enumerate(further[start : start + _FAR], start) if _resembles(line, now))
        if (at := next(near, None)) is not None:
            yield line, further[at]
            start = at + 1


def _resembles(line: Line, other: Line) -> bool:
    return 2 * len({*line.words} & {*other.words}) >= len({*line.words} | {*other.words})


def _measured(text: str) -> dict[int, int]:
    """Where durations, rates and sizes of memory begin and end. "max 3 min 1 s 2" has none: `min` names the number
    behind it; in "3 min 12 s" it is a unit, as that number has one."""
    measured: dict[int, int] = {}
    for match in reversed([*_NUMBER.finditer(text)]):
        name, unit = (pattern.match(text, match.end()) for pattern in (_NAME, _MEASURED))
        if unit and (not name or name.end() in measured):
            measured[match.start()] = unit.end()
    return dict(reversed(measured.items()))
