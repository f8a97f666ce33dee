"""Which samples of a step are this rank's: an even cut, and a pure function of length, seed, epoch and step."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch

from samestep.errors import UsageError
from samestep.train.passes import cut
from samestep.train.streams import seed_of


def order(length: int, seed: int, epoch: int, shuffle: bool) -> torch.Tensor:
    """The samples of an epoch in their order, which does not depend on the number of ranks."""
    if not shuffle:
        return torch.arange(length, device="cpu")
    generator = torch.Generator().manual_seed(seed_of("order", seed, epoch))
    return torch.randperm(length, generator=generator, device="cpu")


@dataclass(frozen=True, slots=True)
class Piece:
    """A batch of all ranks as positions in the epoch's order, and this rank's part of it."""

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


class Pieces(Sequence[Piece]):
    """The batches from position `start` on, each computed on access: an epoch may have 10^8 batches."""

    def __init__(
        self, length: int, batch_size: int, size: int, rank: int, *, start: int, drop_last: bool, even: bool
    ) -> None:
        """With `even`, a last batch smaller than `size` is filled from the batch before, or added to it."""
        stops = range(start + batch_size, length + 1, batch_size)
        last = [length] if not drop_last and (stops[-1] if stops else start) < length else []
        if even and last and stops and length - stops[-1] < size:
            stops = stops[:-1]
            before = stops[-1] if stops else start
            last = [length - size, length] if length - before >= 2 * size else [length]
        self._start, self._stops, self._last = start, stops, last
        self._size, self._rank = size, rank

    def __len__(self) -> int:
        return len(self._stops) + len(self._last)

    @property
    def last_sizes(self) -> list[int]:
        """The numbers of samples in the last two batches."""
        return [self[number].all for number in range(max(len(self) - 2, 0), len(self))]

    def __getitem__(self, number: Any) -> Any:
        number = range(len(self))[number]
        return piece(self._stop(number - 1), self._stop(number), self._size, self._rank)

    def _stop(self, number: int) -> int:
        if number < 0:
            return self._start
        return self._stops[number] if number < len(self._stops) else self._last[number - len(self._stops)]


def pieces(serial: Pieces, even: Pieces, is_even: Callable[[], bool]) -> Iterator[Piece]:
    """The serial script's batches; only before the last two, where the even cut may differ, is it asked which it is."""
    last_two = max(len(serial) - 2, 0)
    yield from map(serial.__getitem__, range(last_two))
    last = even if is_even() else serial
    yield from map(last.__getitem__, range(last_two, len(last)))


def differing(serial: Pieces, even: Pieces, size: int) -> str:
    """A sentence on an evaluation that computes gradients, and so has a sample for each rank in every batch."""
    ours, theirs = (" and ".join(map(str, pieces.last_sizes)) for pieces in (even, serial))
    return (
        f"an evaluation that calls backward() ends with batches of {ours} samples, and the serial script's with "
        f"{theirs}, since each of {size} ranks needs a sample: what is computed from each batch's gradient, as its "
        f"square, differs; choose a batch_size with at least {size} samples in the last batch, or drop_last=True"
    )


def piece(start: int, stop: int, size: int, rank: int) -> Piece:
    first, last = cut(stop - start, size, rank)
    return Piece(start, stop, start + first, start + last)


def weight(batch: Piece, length: int | None, batch_size: int) -> float:
    """This rank's part of the serial script's batch, also where the last batch was filled from the batch before."""
    if length is None:
        return batch.mine / batch.all
    full = length - length % batch_size
    of_last = max(0, batch.mine_stop - max(batch.mine_start, full))
    return (batch.mine - of_last) / batch_size + (of_last / (length - full) if of_last else 0.0)


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
    """NumPy's integers as Python's; other values stay."""
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else value
