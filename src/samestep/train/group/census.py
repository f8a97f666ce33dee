"""The ranks' values in a message: a value that several ranks have in common is sent once, with their ranks."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

from samestep.rendezvous.member import merged as merged_spans

Ranks = list[list[int]]  # spans of ranks: first and last
Value = TypeVar("Value")


class Item(NamedTuple):
    """A part of a message: its kind, the ranks it is from, and its bytes."""

    kind: str
    ranks: Any
    value: bytes


def pack(head: Any, parts: Sequence[Any]) -> bytes:
    """A message of JSON and of parts in bytes."""
    return b"".join((json.dumps([head, [len(part) for part in parts]]).encode(), b"\n", *parts))


def unpack(message: bytes) -> tuple[Any, list[bytes]]:
    """What `pack` was given; raises one of NONSENSE for other bytes."""
    end = message.index(b"\n")
    head, lengths = json.loads(message[:end])
    ends = accumulate(lengths, initial=end + 1)
    return head, [message[begin:end] for begin, end in pairwise(ends)]


def message_of(items: Sequence[Item]) -> bytes:
    return pack([[item.kind, item.ranks] for item in items], [item.value for item in items])


def items_of(message: bytes) -> list[Item]:
    """The items of a message; raises one of NONSENSE for other bytes."""
    return [Item(kind, ranks, value) for (kind, ranks), value in zip(*unpack(message), strict=True)]


def merged(items: Iterable[Item]) -> list[Item]:
    """The items with those of equal kind and value merged, in the order of their first ranks."""
    ranks_of: dict[tuple[str, bytes], Ranks] = {}
    for kind, ranks, value in items:
        ranks_of.setdefault((kind, value), []).extend(ranks)
    joined = [Item(kind, merged_spans(ranks), value) for (kind, value), ranks in ranks_of.items()]
    return sorted(joined, key=lambda item: item.ranks[0][0])


def of_kind(kind: str, items: Iterable[Item]) -> list[Item]:
    return [item for item in items if item.kind == kind]


def item_of(rank: int, value: Any) -> Item:
    kind, data = ("payload", value) if isinstance(value, bytes) else ("json", json.dumps(value).encode())
    return Item(kind, [[rank, rank]], data)


def value_of(item: Item) -> Any:
    return json.loads(item.value) if item.kind in ("json", "marks") else item.value


def by_rank(items: Iterable[Item], size: int) -> list[Any]:
    values: list[Any] = [None] * size
    for item in items:
        value = value_of(item)
        for first, last in item.ranks:
            values[first : last + 1] = [value] * (last + 1 - first)
    return values


def added(
    blocks: Mapping[tuple[int, int], Value], size: int, add: Callable[[Value, Value], Value]
) -> dict[tuple[int, int], Value]:
    """Add neighbouring blocks of 2**level ranks or microbatches, keyed by level and number, as far as possible."""
    # Example: blocks (0, 2) and (0, 3) become (1, 1). Which blocks are added depends only on `size`, so every
    # distribution over processes and machines gives the same bits.
    done: dict[tuple[int, int], Value] = {}
    todo = sorted(blocks.items(), key=itemgetter(0), reverse=True)
    while todo:
        (level, number), value = todo.pop()
        neighbour = (level, number ^ 1)
        if neighbour in done:
            value_there = done.pop(neighbour)
            todo.append(
                ((level + 1, number // 2), add(value_there, value) if number % 2 else add(value, value_there))
            )
        elif number and number % 2 == 0 and (number + 1) << level >= size:
            todo.append(((level + 1, number // 2), value))  # the last block has no neighbour
        else:
            done[level, number] = value
    return done
