"""The place of each process in the tree of a run, which has few links per process and few between machines.

The first processes of the machines form a binomial tree (the parent of number i is i without its lowest bit), and so
do the processes of each machine. So a process has at most log2(processes here) + log2(machines) + 1 links.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from samestep.rendezvous.member import Place, place_from


class Position(NamedTuple):
    """A process's path to number 0 in the tree, and its place among the machines of the run."""

    path: Sequence[int]  # its parent, the parent's parent and so on, up to number 0
    parent_places: Sequence[Place]  # where the parent listens
    children: Sequence[int]  # the processes that still have to connect to it
    node: int
    nodes: int
    local_rank: int
    local_size: int
    sharing: Mapping[str, int]  # by set of cores, how many processes here may use it
    address: str  # this machine's, for other machines; "" if none or known already


def positions(
    hellos: Mapping[int, Mapping[str, Any]], sharing: Mapping[str, Mapping[str, int]], source: str
) -> dict[int, Position]:
    """All positions of a run; `source` is the address of number 0, `sharing` is by machine."""
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
    result = {}
    for node, (machine, numbers) in enumerate(machines.items()):
        for local_rank, number in enumerate(numbers):
            path = [number]
            while path[-1]:
                path.append(parents[path[-1]])
            facts = (node, len(nodes), local_rank, len(numbers), sharing[machine], "" if node else source)
            result[number] = Position(path[1:], hellos[parents[number]]["places"], children[number], *facts)
    return result


def read_position(message: Mapping[str, Any]) -> Position:
    """The position in a message of number 0; raises one of NONSENSE if the message is no position."""
    facts: dict[str, Any] = {
        name: int(message[name]) for name in ("node", "nodes", "local_rank", "local_size")
    } | {name: [int(number) for number in message[name]] for name in ("path", "children")}
    if not facts["path"]:
        raise ValueError("no parent")
    sharing = {str(cores): int(number) for cores, number in message["sharing"].items()}
    places = [place_from(place) for place in message["parent_places"]]
    return Position(**facts, parent_places=places, sharing=sharing, address=str(message["address"]))


def parent_of(place: int) -> int:
    """The place of the parent of a place in a binomial tree."""
    return place & (place - 1)
