"""Expands Slurm's short forms in Slurm's order: node lists, and tasks per node."""

import re
from itertools import product

from samestep.errors import PlacementError
from samestep.text import printable

_MOST_NODES = 1 << 16
_LONGEST_NAME = 255
_ITEM = re.compile(r"(?:\[[^\[\]]*\]|[^,])+")
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_LITERAL = re.compile(r"[A-Za-z0-9._-]*")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_TASKS = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


def expand_nodes(text: str) -> list[str]:
    """`a[1-2]b[3-4],c` as a1b3 a1b4 a2b3 a2b4 c: the first name is where Slurm puts task 0."""
    names: list[str] = []
    for item in _ITEM.findall(text):
        literal = _BRACKETS.sub("", item)
        if not _LITERAL.fullmatch(literal):
            raise _refused(text, f"has {printable(item)}, which is not a host name")
        axes: list[list[str]] = []
        count, longest = 1, len(literal)
        for brackets in _BRACKETS.findall(item):
            axes.append(_numbers(brackets, text))
            count, longest = count * len(axes[-1]), longest + len(axes[-1][-1])
            if len(names) + count > _MOST_NODES:
                raise _too_many(text)
        if longest > _LONGEST_NAME:
            raise _refused(text, f"has a name longer than {_LONGEST_NAME} characters")
        form = _BRACKETS.sub("{}", item)
        # Slurm turns the last bracket fastest, then the first, then the second, and so on (22.05).
        turns = product(*axes[-2::-1], *axes[-1:])
        names += [form.format(*turn[-2::-1], *turn[-1:]) for turn in turns]
    if not names:
        raise _refused(text, "names no node")
    return names


def tasks_per_node(text: str) -> list[int]:
    """`4(x2),3` as 4 4 3."""
    counts: list[int] = []
    for item in text.split(","):
        match = _TASKS.fullmatch(item)
        if not match or len(counts) + int(match[2] or 1) > _MOST_NODES:
            raise PlacementError(
                f"{printable(text)} does not say how many tasks each node has; write it like 4(x2),3"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def device_count(text: str) -> int:
    """`a100:2,v100:1`, or just `3`, as 3; 0 if there is no number."""
    numbers = [item.rpartition(":")[2] for item in text.split(",")]
    return sum(int(number) for number in numbers if re.fullmatch("[0-9]{1,6}", number))


def _numbers(brackets: str, text: str) -> list[str]:
    numbers: list[str] = []
    for item in brackets.split(","):
        match = _RANGE.fullmatch(item)
        if not match or int(match[2] or match[1]) < int(match[1]):
            raise _refused(text, f"has {printable(item) or 'nothing'} in brackets, which is not a range")
        low, high = int(match[1]), int(match[2] or match[1])
        if len(numbers) + high - low >= _MOST_NODES:
            raise _too_many(text)
        numbers += [f"{number:0{len(match[1])}}" for number in range(low, high + 1)]
    return numbers


def _too_many(text: str) -> PlacementError:
    return _refused(text, f"names more than {_MOST_NODES} nodes")


def _refused(text: str, why: str) -> PlacementError:
    return PlacementError(f"the node list {printable(text)} {why}; write it like node[01-03,07],gpu5")
