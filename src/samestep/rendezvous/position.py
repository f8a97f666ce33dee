"""Where each process of a run is in the tree of all: at most one link to another machine's first, and few at home.

The first processes of the machines are a binomial tree (the parent of number i is i without its lowest bit), and so
are the processes of each machine. So each has at most log2(processes here) + log2(machines) + 1 links.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from samestep.rendezvous.member import Place, place_from


class Position(NamedTuple):
    """A process's way to number 0 in the tree, and its place among the machines of the run."""

    path: Sequence[int]  # its parent, that one's parent and so on, up to number 0
    parent_places: Sequence[Place]  # where the parent listens
    children: Sequence[int]  # those that connect to it now; others have come through it
    node: int
    nodes: int
    local_rank: int
    local_size: int
    sharing: Mapping[str, int]  # by what cores a process may use, how many of this machine may use the same
    address: str  # of this machine for the others, empty where there are none or its own connection tells


def positions(
    hellos: Mapping[int, Mapping[str, Any]], sharing: Mapping[str, Mapping[str, int]], source: str
) -> dict[int, Position]:
    """The positions of those that came to number 0, and its own; `source` is its address, `sharing` by machine."""
    machines: dict[str, list[int]] = {}
    for number in sorted(hellos):
        machines.setdefault(hellos[number]["machine"], []).append(number)
    nodes = list(machines.values())
    parents = {
        number: numbers[parent_of(local_rank)] if local_rank else nodes[parent_of(node)][0]
        for node, numbers in enumerate(nodes)
        for local_rank, number in enumerate(numbers)
    }
    children: dict[int, list[int]] = {number: [] for number in parents}
    for number in sorted(parents.keys() - {0}):
        children[parents[number]].append(number)
    found = {}
    for node, (machine, numbers) in enumerate(machines.items()):
        for local_rank, number in enumerate(numbers):
            path = [number]
            while path[-1]:
                path.append(parents[path[-1]])
            at = (node, len(nodes), local_rank, len(numbers), sharing[machine], "" if node else source)
            found[number] = Position(path[1:], hellos[parents[number]]["places"], children[number], *at)
    return found


def read_position(said: Mapping[str, Any]) -> Position:
    """The position that number 0 sent; one of NONSENSE where it is none."""
    facts: dict[str, Any] = {
        name: int(said[name]) for name in ("node", "nodes", "local_rank", "local_size")
    } | {name: [int(number) for number in said[name]] for name in ("path", "children")}
    if not facts["path"]:
        raise ValueError("no parent")
    sharing = {str(cores): int(number) for cores, number in said["sharing"].items()}
    places = [place_from(place) for place in said["parent_places"]]
    return Position(**facts, parent_places=places, sharing=sharing, address=str(said["address"]))


def parent_of(place: int) -> int:
    """The place of the parent of a place in a binomial tree."""
    return place & (place - 1)


def below(place: int, size: int) -> int:
    """How many of `size` places are at or below a place in a binomial tree."""
    return min(place & -place, size - place) if place else size
