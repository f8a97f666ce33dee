"""What a training run left outside of its processes: the steps that were taken, on what, and the committed state."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from samestep.state import file

State = dict[tuple[Any, ...], bytes]


class Trail:
    """A directory with the commits of one run, and the log of each of its ranks."""

    def __init__(self, home: Path) -> None:
        self.directory = home / "commits"
        self.log = home / "log"
        home.mkdir(exist_ok=True)

    def taken(self) -> dict[int, dict[int, tuple[float, Counter[int]]]]:
        """For each step, for each attempt that took it: when first, and all ranks' samples."""
        found: dict[int, dict[int, tuple[float, Counter[int]]]] = defaultdict(dict)
        for path in self.log.parent.glob(f"{self.log.name}-*"):
            for line in path.read_text().splitlines():
                attempt, step, when, *samples = line.split()
                first, together = found[int(step)].get(int(attempt), (float(when), Counter()))
                whole = together + Counter(map(int, samples))
                found[int(step)][int(attempt)] = min(first, float(when)), whole
        return found

    def against(self, other: "Trail") -> tuple[int, int]:
        """The samples lost and taken twice beside another run; a step's last attempt is what was gone on from."""
        lost = twice = 0
        ours, theirs = self.taken(), other.taken()
        for step in ours.keys() | theirs.keys():
            mine, right = (max(run.get(step, {0: (0.0, Counter())}).items())[1][1] for run in (ours, theirs))
            lost, twice = lost + (right - mine).total(), twice + (mine - right).total()
        return lost, twice

    def state(self) -> State:
        """The newest commit."""
        newest = file.listing(self.directory)[0]
        return dict(leaves(file.read(self.directory / newest.name)[0]))


def leaves(node: Any, where: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], bytes]]:
    """Every value of a state by its place, as bytes."""
    if isinstance(node, dict | list | tuple):
        pairs = node.items() if isinstance(node, dict) else enumerate(node)
        for key, value in pairs:
            yield from leaves(value, (*where, key))
    else:
        yield where, node if isinstance(node, bytes) else repr(node).encode()


def differing_bits(left: State, right: State) -> int:
    count = 0
    for place in left.keys() | right.keys():
        pair = [state.get(place, b"") for state in (left, right)]
        length = max(map(len, pair))
        first, second = (int.from_bytes(value.ljust(length, b"\0"), "little") for value in pair)
        count += (first ^ second).bit_count() + 8 * abs(len(pair[0]) - len(pair[1]))
    return count
