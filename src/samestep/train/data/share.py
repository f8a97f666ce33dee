"""Which samples of a step are this rank's: a pure function of length, seed, epoch and step, cut evenly."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from samestep.errors import UsageError


def cut(count: int, size: int, rank: int) -> tuple[int, int]:
    """Where rank's part of count things begins and ends; parts differ by at most one, larger ones first."""
    small, larger = divmod(count, size)
    start = rank * small + min(rank, larger)
    return start, start + small + (rank < larger)


def seed_of(*facts: int | str) -> int:
    """A 63-bit seed that is a function of the facts alone, alike on every machine."""
    digest = hashlib.blake2b("/".join(map(str, facts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def order(length: int, seed: int, epoch: int, shuffle: bool) -> torch.Tensor:
    """The samples of one epoch, in the order every number of processes takes them."""
    if not shuffle:
        return torch.arange(length)
    generator = torch.Generator().manual_seed(seed_of("order", seed, epoch))
    return torch.randperm(length, generator=generator)


@dataclass(frozen=True, slots=True)
class Piece:
    """One batch of the whole world as positions in the epoch's order, and this rank's part of it."""

    start: int
    stop: int
    mine_start: int
    mine_stop: int

    @property
    def mine(self) -> int:
        return self.mine_stop - self.mine_start

    @property
    def all(self) -> int:
        return self.stop - self.start


def pieces(
    length: int,
    batch_size: int,
    size: int,
    rank: int,
    *,
    start: int = 0,
    drop_last: bool = False,
    even: bool = False,
) -> Iterator[Piece]:
    """The batches from position start on; with even, a last one below size is filled from the one before."""
    stops = list(range(start + batch_size, length + 1, batch_size))
    if not drop_last and start < length and (not stops or stops[-1] < length):
        stops.append(length)
    if even and len(stops) > 1 and stops[-1] - stops[-2] < size:
        before = stops[-3] if len(stops) > 2 else start
        stops[-2:] = [stops[-1] - size, stops[-1]] if stops[-1] - before >= 2 * size else [stops[-1]]
    for stop in stops:
        first, last = cut(stop - start, size, rank)
        yield Piece(start, stop, start + first, start + last)
        start = stop


def check_batch_size(batch_size: int, size: int) -> None:
    if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
        raise UsageError(
            f"batch_size {batch_size!r} is not a number of samples; use an integer of at least 1"
        )
    if batch_size < size:
        raise UsageError(
            f"batch_size {batch_size} is smaller than the {size} ranks that share it; "
            f"use at least {size}, or fewer processes"
        )


@dataclass(slots=True, eq=False)
class Pass:
    """One way through a loader: what this rank was given of the batch at hand, and so far.

    In a step of microbatches, `index` is the one at hand of `count`, None between steps, and `last` is whether
    it is this rank's last.
    """

    of: Any
    order: torch.Tensor
    start: int = 0
    mine: int = 0
    all: int = 0
    mine_so_far: int = 0
    lent: bool = False
    training: bool = False
    index: int | None = None
    count: int = 0
    last: bool = True

    @property
    def samples(self) -> torch.Tensor:
        return self.order[self.start : self.start + self.mine]

    def take(self, start: int, mine: int, whole: int, lent: bool) -> None:
        self.start, self.mine, self.all, self.lent = start, mine, whole, lent
        self.mine_so_far += mine


_open: list[Pass] = []
_counted: int | None = None
_inside = 0


@contextmanager
def open_pass(of: object, order: torch.Tensor) -> Iterator[Pass]:
    """While this is open its share is the current one; an inner pass (evaluation) comes before an outer."""
    global _counted
    one = Pass(of, order)
    _open.append(one)
    try:
        yield one
    finally:
        _open.remove(one)
        _counted = one.mine_so_far


def current() -> Pass | None:
    """The pass whose batch is being worked on, None outside every loop."""
    return _open[-1] if _open else None


def weight(size: int) -> float:
    """What this rank's mean loss counts for in a plain average over ranks: 1.0 where shares are equal."""
    if not _open or not _open[-1].all:
        return 1.0
    return _open[-1].mine * size / _open[-1].all


def weight_to_come(size: int) -> float:
    """What a gradient of this rank's loss is still to be multiplied by: inside of a model that weighs, it was."""
    return 1.0 if _inside else weight(size)


@contextmanager
def inside_model() -> Iterator[None]:
    """While this is open, gradients of what is computed come weighed from the model's output."""
    global _inside
    _inside += 1
    try:
        yield
    finally:
        _inside -= 1


def unlike() -> bool:
    """Whether loops within each other give this rank unlike parts of their batches."""
    return len(_open) > 1 and len({one.mine / one.all for one in _open if one.all}) > 1


def counted() -> int | None:
    """The samples this rank was given: of the batch at hand, or after a loop of the whole pass."""
    if _open:
        return _open[-1].mine
    return _counted
