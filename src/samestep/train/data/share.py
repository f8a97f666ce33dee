"""Which samples of a step are this rank's: a pure function of length, seed, epoch and step, cut evenly."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch

from samestep.errors import UsageError
from samestep.train.step import cut
from samestep.train.streams import seed_of


def order(length: int, seed: int, epoch: int, shuffle: bool) -> torch.Tensor:
    """The samples of one epoch, in the order every number of processes takes them."""
    if not shuffle:
        return torch.arange(length, device="cpu")
    generator = torch.Generator().manual_seed(seed_of("order", seed, epoch))
    return torch.randperm(length, generator=generator, device="cpu")


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
    return pieces_at(stops, size, rank, start=start)


def pieces_at(stops: Iterable[int], size: int, rank: int, *, start: int) -> Iterator[Piece]:
    """The batches that end at these positions."""
    for stop in stops:
        first, last = cut(stop - start, size, rank)
        yield Piece(start, stop, start + first, start + last)
        start = stop


def weight(piece: Piece, length: int | None, batch_size: int) -> float:
    """This rank's samples as parts of the serial script's batches, also where a last batch is filled."""
    if length is None:
        return piece.mine / piece.all
    full = length - length % batch_size
    of_last = max(0, piece.mine_stop - max(piece.mine_start, full))
    return (piece.mine - of_last) / batch_size + (of_last / (length - full) if of_last else 0.0)


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


def as_int(value: Any) -> Any:
    """NumPy's whole numbers are whole numbers too."""
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else value
