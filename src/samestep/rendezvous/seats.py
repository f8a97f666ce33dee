"""Where each process of a run is in the tree of all: at most one link to another machine's first, and few at home.

The first processes of the machines are a binomial tree (the parent of number i is i without its lowest bit), and so
are the processes of each machine. So each has at most log2(processes here) + log2(machines) + 1 links.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Seat(NamedTuple):
    """A process's parent and where that listens, its children, and its place among the machines of the run."""

    parent: int
    doors: Sequence[Any]
    children: Sequence[int]
    node: int
    nodes: int
    local_rank: int
    local_size: int
    sharing: int  # how many processes, this one too, may use the same cores
    address: str  # of this machine for the others, empty where there are none or its own connection tells


def seats(hellos: Sequence[Mapping[str, Any]], source: str, *, is_flat: bool) -> list[Seat]:
    """Each process's seat, by number, from what they said of themselves; `source` is number 0's own address."""
    machines: dict[str, list[int]] = {}
    for number, hello in enumerate(hellos):
        machines.setdefault(str(hello["machine"]), []).append(number)
    groups = list(machines.values())
    parents = {0: 0}
    for node, group in enumerate(groups):
        parents |= {number: group[place & (place - 1)] for place, number in enumerate(group) if place}
        if node:
            parents[group[0]] = groups[node & (node - 1)][0]
    if is_flat:
        parents = dict.fromkeys(parents, 0)
    children: dict[int, list[int]] = {number: [] for number in parents}
    for number in sorted(parents):
        if number:
            children[parents[number]].append(number)
    places = {
        number: (node, place) for node, group in enumerate(groups) for place, number in enumerate(group)
    }
    cores = [(hello["machine"], str(hello["facts"].get("cores"))) for hello in hellos]
    sharing: dict[tuple[Any, str], int] = {}
    for one in cores:
        sharing[one] = sharing.get(one, 0) + 1
    return [
        Seat(
            parents[number],
            hellos[parents[number]]["doors"],
            children[number],
            node := places[number][0],
            len(groups),
            places[number][1],
            len(groups[node]),
            sharing[cores[number]],
            source if node == 0 else "",
        )
        for number in range(len(hellos))
    ]
