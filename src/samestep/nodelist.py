"""Slurm's short forms written out in Slurm's own order: node lists, and tasks per node."""

import re
from itertools import product

from samestep.errors import PlacementError

_MOST = 1 << 16  # Slurm's own limit for one expression
_WORD = re.compile(r"[A-Za-z0-9._-]*")
_SPAN = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_TASKS = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


def expand_nodes(text: str) -> list[str]:
    """`a[1-2]b[3-4],c` as a1b3 a1b4 a2b3 a2b4 c: the first name is where Slurm puts task 0."""
    names: list[str] = []
    for item in filter(None, re.split(r",(?![^\[\]]*\])", text)):
        axes: list[list[str]] = []
        count = 1
        for literal, brackets in re.findall(r"([^\[\]]*)(\[[^\[\]]*\])?", item):
            axes += [[literal]] + ([_numbers(brackets[1:-1], text)] if brackets else [])
            count *= len(axes[-1])
            if len(names) + count > _MOST:
                raise _refused(text, f"names more than {_MOST} nodes")
        if "".join(re.findall(r"[^\[\]]*(?:\[[^\[\]]*\])?", item)) != item:
            raise _refused(text, "has a bracket without its partner")
        names += map("".join, product(*axes))
    if not names:
        raise _refused(text, "names no node")
    if not all(map(_WORD.fullmatch, names)):
        raise _refused(text, "has characters that no host name has")
    return names


def tasks_per_node(text: str) -> list[int]:
    """`4(x2),3` as 4 4 3."""
    counts: list[int] = []
    for item in text.split(","):
        found = _TASKS.fullmatch(item)
        if found is None:
            raise PlacementError(f"{shown(text)} does not read as tasks per node; write it like 4(x2),3")
        times = int(found[2] or 1)
        if len(counts) + times > _MOST:
            raise PlacementError(
                f"{shown(text)} counts tasks on more than {_MOST} nodes; write it like 4(x2),3"
            )
        counts += [int(found[1])] * times
    return counts


def shown(text: str) -> str:
    """A value as a message may show it: on one line, and not long."""
    return ascii(text if len(text) <= 60 else text[:57] + "...").strip("'\"")


def _numbers(text: str, whole: str) -> list[str]:
    numbers: list[str] = []
    for item in text.split(","):
        span = _SPAN.fullmatch(item)
        if span is None or int(span[2] or span[1]) < int(span[1]):
            raise _refused(whole, f"has [{shown(text)}], which is no range")
        low, high = int(span[1]), int(span[2] or span[1])
        if len(numbers) + high - low >= _MOST:
            raise _refused(whole, f"names more than {_MOST} nodes")
        numbers += [f"{number:0{len(span[1])}}" for number in range(low, high + 1)]
    return numbers


def _refused(text: str, why: str) -> PlacementError:
    return PlacementError(f"the node list {shown(text)} {why}; write it like node[01-03,07],gpu5")
