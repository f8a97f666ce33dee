"""Where each process of a run is in the tree of all: at most one link to another machine's first, and few at home.

The first processes of the machines are a binomial tree (the parent of number i is i without its lowest bit), and so
are the processes of each machine. So each has at most log2(processes here) + log2(machines) + 1 links.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Position(NamedTuple):
    """A process's way to number 0 in the tree, its children, and its place among the machines of the run."""

    path: Sequence[int]  # its parent, that one's parent and so on, up to number 0
    parent_places: Sequence[Any]  # where the parent listens
    children: Sequence[int]
    node: int
    nodes: int
    local_rank: int
    local_size: int
    sharing: int  # how many processes, this one too, may use the same cores
    address: str  # of this machine for the others, empty where there are none or its own connection tells


def positions(hellos: Sequence[Mapping[str, Any]], source: str) -> list[Position]:
    """Each process's position, by number, from what they said of themselves; `source` is number 0's own address."""
    machines: dict[str, list[int]] = {}
    for number, hello in enumerate(hellos):
        machines.setdefault(str(hello["machine"]), []).append(number)
    nodes = list(machines.values())
    at, parents = {}, {}
    for node, numbers in enumerate(nodes):
        for local_rank, number in enumerate(numbers):
            at[number] = node, local_rank
            parents[number] = numbers[_parent(local_rank)] if local_rank else nodes[_parent(node)][0]
    children: dict[int, list[int]] = {number: [] for number in parents}
    for number in range(1, len(hellos)):
        children[parents[number]].append(number)
    cores = [(hello["machine"], str(hello["facts"].get("cores"))) for hello in hellos]
    sharing = Counter(cores)
    return [
        Position(
            _path(number, parents),
            hellos[parents[number]]["places"],
            children[number],
            node,
            len(nodes),
            local_rank,
            len(nodes[node]),
            sharing[cores[number]],
            "" if node else source,
        )
        for number, (node, local_rank) in sorted(at.items())
    ]


def _parent(place: int) -> int:
    return place & (place - 1)


def _path(number: int, parents: Mapping[int, int]) -> list[int]:
    path = []
    while number:
        number = parents[number]
        path.append(number)
    return path
