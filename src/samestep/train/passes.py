"""A pass through a loader, and a rank's share of a batch: the values that the spine and its subscribers hand along.

Example: in a step of 5 samples, rank 1 of 2 has the samples 3 and 4. Its Share has start=3, mine=2 and all=5, and
weight(2) is 2 * 2 / 5: by this factor its mean loss is multiplied before gradients are averaged over the 2 ranks.
"""

import weakref
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


def cut(count: int, size: int, rank: int) -> tuple[int, int]:
    """The half-open range of a rank's part of `count` items; parts differ by at most one item, larger parts first."""
    small, larger = divmod(count, size)
    start = rank * small + min(rank, larger)
    return start, start + small + (rank < larger)


class Pass:
    """One iteration of a loader; it refers to the loader and the order weakly, and so keeps neither of them alive."""

    def __init__(self, of: object, epoch: int, start: int = 0, *, training: bool) -> None:
        self.epoch, self.start, self.training = epoch, start, training
        self.microbatches: Collection[int] = ()  # how many its steps have, for `steps`
        self.seed = 0
        self.batches = 0
        self.counted = 0
        # run lengths of its batch sizes so far: [samples on all ranks, how many batches of that size in a row]
        self.sizes: list[list[int]] = []
        self.is_left = self.is_again = self.is_evaluated = False
        self.has_backward = self.derives_weights = False  # its first loss, and that by nothing else
        self.latest: Share | None = None
        self.loop: Any = None  # of the script, around the call of next() for a batch that is lent to ranks
        # the latest batch's tensors, and its ragged tensors, by their place in the batch
        self.batch: dict[str, weakref.ref[torch.Tensor]] = {}
        self.ragged: dict[str, Ragged] = {}
        self._of = weakref.ref(of)
        self._order: Callable[[], Any] = lambda: None

    def take_order(self, order: Any, seed: int) -> None:
        self._order, self.seed = weakref.ref(order), seed

    def note(self, samples: int) -> None:
        if not self.sizes or self.sizes[-1][0] != samples:
            self.sizes.append([samples, 0])
        self.sizes[-1][1] += 1

    def places(self, size: int) -> list[list[range]]:
        """For each rank and each batch so far, the positions of the rank's samples in the pass."""
        places_of: list[list[range]] = [[] for _ in range(size)]
        start = 0
        for samples, batches in self.sizes:
            parts = [range(*cut(samples, size, rank)) for rank in range(size)]
            for first in range(start, start + samples * batches, samples):
                for places, part in zip(places_of, parts, strict=True):
                    places.append(range(first + part.start, first + part.stop))
            start += samples * batches
        return places_of

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The latest batch's tensors that are still in memory, with their places in the batch."""
        tensors = ((name, reference()) for name, reference in self.batch.items())
        return ((name, tensor) for name, tensor in tensors if tensor is not None)

    @property
    def of(self) -> Any:
        return self._of()

    @property
    def order(self) -> Any:
        return self._order()


class Rows(NamedTuple):
    """This rank's rows of a dimension: `mine` rows from row `start` on, of `all` rows on all ranks."""

    mine: int
    start: int
    all: int


class Ragged(NamedTuple):
    """The batch dimension of a tensor whose samples are not in dimension 0, or whose rows are nodes or words."""

    dim: int
    rows: Rows


@dataclass(frozen=True, eq=False, slots=True)
class Share:
    """This rank's samples of a batch or of a microbatch, as positions in the order of the epoch."""

    # lent: this rank has no samples of its own, and takes the step with weight 0 on samples of another rank.

    of: Pass
    batch_start: int
    start: int
    mine: int
    all: int
    lent: bool = False
    microbatch: int | None = None
    microbatches: int = 1
    first: bool = True
    last: bool = True
    step: int = -1

    @property
    def samples(self) -> torch.Tensor:
        """The indices of this rank's samples; none when the pass has ended."""
        order: torch.Tensor | None = self.of.order
        if order is None:
            return torch.empty(0, dtype=torch.int64, device="cpu")
        return order[self.start : self.start + self.mine]

    @property
    def rows(self) -> Rows:
        return Rows(self.mine, self.start - self.batch_start, self.all)

    def dim_in(self, name: str) -> int:
        """The dimension of the samples in the batch's tensor `name`."""
        ragged = self.of.ragged.get(name)
        return ragged.dim if ragged is not None and ragged.rows == self.rows else 0

    def weight(self, size: int) -> float:
        """The weight of this rank's mean loss in an average over ranks: 1.0 where shares are equal."""
        return self.mine * size / self.all if self.all else 1.0
