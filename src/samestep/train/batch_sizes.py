"""Sizes that stand for a batch, so that a dimension of it is known from one that happens to be as large."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from samestep.train.loss import Averaged
from samestep.train.step import Share
from samestep.train.views import meta_of

# Primes are no products of the sizes of layers. The first stands for the samples, the next ones for nodes of graphs and
# the like, the last ones for a batch that is merged behind another dimension, as in a view of (length * batch, …).
_SAMPLES = 7919
_RAGGED = (7841, 7853, 7867, 7873, 7877, 7879, 7883, 7901, 7907)
_MERGED = (7927, 7933, 7937, 7949, 7951, 7963, 7993, 8009, 8011, 8017)
_CUTS = {"slice", "split", "split_with_sizes"}


@dataclass(frozen=True)
class Place:
    """The dimension of the batch, None for a draw that is one for all ranks, and the memory's order.

    The dimension may be merged of several: `before` the batch, and `after` it. It is that of the
    samples, or of nodes of graphs and the like, whose name in the batch is in `ragged`.
    """

    dim: int | None
    before: int = 1
    after: int = 1
    layout: tuple[int, ...] = ()
    ragged: str = ""


class Kind(NamedTuple):
    """The size that stands for this rank's `mine` samples, or for its nodes of graphs and the like."""

    size: int
    mine: int
    before: int = 1
    ragged: str = ""


class Other(NamedTuple):
    """A tensor, and the same of another batch size; None where that is not known.

    Its samples may be in another `order` than the batch's; of a single sample, without their dimension, it is that one.
    """

    tensor: torch.Tensor
    other: torch.Tensor | None
    sure: bool = True
    averaged: Averaged | None = None
    order: tuple[int, ...] = ()

    @property
    def has_batch(self) -> bool:
        return isinstance(self.other, torch.Tensor) and self.other.shape != self.tensor.shape

    @property
    def is_constant(self) -> bool:
        """Whether it surely has nothing of the batch."""
        return self.sure and self.other is not None and not self.has_batch


def _unless_in_order(rows: Iterable[int]) -> tuple[int, ...]:
    order = tuple(rows)
    return () if order == tuple(range(len(order))) else order


def stands_for_samples(size: int) -> bool:
    """Whether it stands for samples, and not for nodes of graphs and the like."""
    return any(size and size % one == 0 for one in (_SAMPLES, *_MERGED))


class Kinds:
    """The kinds of sizes in a call: the samples, what is ragged, and batches merged behind another dimension."""

    def __init__(self, share: Share) -> None:
        self.samples = Kind(_SAMPLES, share.mine)
        # tensors of equal rows, such as those of nodes and of the graph that each is in, are of one kind
        self._laid = share.of.ragged
        names = {one.rows: name for name, one in reversed(self._laid.items()) if one.rows != share.rows}
        self.ragged = {
            rows: Kind(size, rows.mine, 1, name)
            for size, (rows, name) in zip(_RAGGED, names.items(), strict=False)
        }
        self._all = [self.samples, *self.ragged.values()]

    def sizes(self) -> dict[int, int]:
        """For as many rows as this rank has of a kind, the size that stands for them."""
        return {one.before * one.mine: one.before * one.size for one in reversed(self._all)}

    def at(self, place: Place) -> Kind:
        """What is at a place, as it was found in another batch too."""
        laid = self._laid.get(place.ragged)
        return self.behind(place.before, self.ragged.get(laid.rows, self.samples) if laid else self.samples)

    def in_size(self, size: int) -> list[Kind]:
        return [kind for kind in self._all if size and size % kind.size == 0]

    def batch_in(self, tensor: torch.Tensor, other: torch.Tensor) -> tuple[int, Kind] | None:
        """The dimension of the batch, None where there is none; LookupError where the sizes are no such two."""
        unlike = [dim for dim in range(tensor.dim()) if tensor.shape[dim] != other.shape[dim]]
        if not unlike:
            return None
        dim = unlike[0]
        for kind in self.in_size(other.shape[dim]):
            if len(unlike) == 1 and other.shape[dim] // kind.size * kind.mine == tensor.shape[dim]:
                return dim, kind
        raise LookupError

    def chosen(
        self, name: str, args: Sequence[Any], made: Any, found: Callable[[torch.Tensor], Other]
    ) -> tuple[torch.Tensor, tuple[int, ...]] | None:
        """The other of a batch's samples in another order, and that order; of a single sample, which one it is."""
        if name in ("flip", "roll"):
            return self._turned(name, found(args[0]), *args[1:])
        if name == "stack":
            return self._stacked(made, [found(one).order for one in args[0]], *args[1:])
        if name in ("select", "index_select"):
            at, rows = args[1] % args[0].dim(), args[2]
        elif name == "index" and sum(one is not None for one in args[1]) == 1:
            at, rows = next((at, one) for at, one in enumerate(args[1]) if one is not None)
        else:
            return None
        of, count = found(args[0]), self.samples.mine
        with suppress(LookupError):
            if of.other is None or self._dim_of_samples(of) != at:
                return None
            if name == "select":
                return meta_of(made), ((of.order or range(count))[rows],)
            # in what was filled piece by piece, as pad_packed_sequence does, their order is not known
            are_numbers = not rows.is_floating_point() and rows.dtype != torch.bool
            if of.sure and are_numbers and rows.shape == (count,):
                return of.other, _unless_in_order((of.order or range(count))[row] for row in rows.tolist())
        return None

    def _turned(
        self, name: str, of: Other, by: Any, dims: Sequence[int] = ()
    ) -> tuple[torch.Tensor, tuple[int, ...]] | None:
        """What flip or roll makes of a batch's samples."""
        at = self._dim_of_samples(of)
        along = [dim % of.tensor.dim() for dim in (by if name == "flip" else dims)]
        if of.other is None or at is None or at not in along:
            return None
        rows = list(of.order or range(self.samples.mine))
        start = -by[along.index(at)] % len(rows) if name == "roll" else 0
        return of.other, _unless_in_order(rows[::-1] if name == "flip" else rows[start:] + rows[:start])

    def _dim_of_samples(self, of: Other) -> int | None:
        """The dimension that has each sample once; None where there is none."""
        with suppress(LookupError):
            if of.other is not None and (found := self.batch_in(of.tensor, of.other)):
                return found[0] if found[1] == self.samples else None
        return None

    def _stacked(
        self, made: torch.Tensor, orders: Sequence[tuple[int, ...]], dim: int = 0
    ) -> tuple[torch.Tensor, tuple[int, ...]] | None:
        """Of the batch's samples, each on its own, in a dimension that this makes for them."""
        rows, count = [one[0] for one in orders if len(one) == 1], self.samples.mine
        if len(orders) != count or sorted(rows) != list(range(count)):
            return None
        sizes = list(made.shape)
        sizes[dim] = self.samples.size
        return meta_of(made, sizes), _unless_in_order(rows)

    def behind(self, before: int, kind: Kind) -> Kind:
        """The same of a batch that is merged behind a dimension of this size; of samples only."""
        if kind.before == before:
            return kind
        if kind.ragged:
            raise LookupError
        known = [one for one in self._all if not one.ragged]
        for one in known:
            if one.before == before:
                return one
        self._all.append(self.samples._replace(size=_MERGED[len(known) - 1 :][0], before=before))
        return self._all[-1]

    def computed(self, func: Any, args: Sequence[Any], others: list[Any], kwargs: Any) -> Any:
        """What the operation makes of the others; LookupError where it takes some of the samples."""
        name = func._opname
        if name in _CUTS and (pieces := self._cut(name, args[0], others[0], args)):
            return pieces[0] if name == "slice" else pieces
        if name == "native_group_norm":
            others[3] = others[0].shape[0]
        elif name == "affine_grid_generator":
            others[1] = [others[0].shape[0], *others[1][1:]]
        made = func(*others, **kwargs)
        return self._end_to_end(made, args[0], others[0], *args[1:]) if name == "cat" else made

    def _end_to_end(
        self, made: torch.Tensor, parts: Sequence[torch.Tensor], others: Sequence[torch.Tensor], dim: int = 0
    ) -> torch.Tensor:
        """The other of tensors one behind the other, each of which may have the whole batch."""
        dim %= made.dim()
        found = [self.batch_in(part, other) for part, other in zip(parts, others, strict=True)]
        kinds = [one[1] for one in found if one is not None and one[0] == dim]
        if not kinds or any(kind.ragged for kind in kinds):
            return made
        rows = {part.shape[dim] // kind.before for part, kind in zip(parts, kinds, strict=False)}
        if len(kinds) < len(parts) or len(rows) > 1:
            raise LookupError
        kind = self.behind(sum(one.before for one in kinds), kinds[0])
        sizes = list(made.shape)
        sizes[dim] = kind.before * rows.pop() // kind.mine * kind.size
        return meta_of(made, sizes)

    def _cut(
        self, name: str, tensor: torch.Tensor, other: torch.Tensor, args: Sequence[Any]
    ) -> list[torch.Tensor]:
        """The others of pieces of a batch, each with all samples; none where the batch is in no dimension that is cut.

        LookupError where a piece has some of the samples: they are not alike on all ranks.
        """
        dim = int((*args[1 if name == "slice" else 2 :], 0)[0]) % tensor.dim()
        found = self.batch_in(tensor, other)
        if found is None or found[0] != dim:
            return []
        size, kind = tensor.shape[dim], found[1]
        rows = size // kind.before
        if name == "slice":
            taken = range(size)[slice(*(*args[2:], None, None, None)[:3])]
            if taken.step != 1 or taken.start % rows:
                raise LookupError
            lengths = [len(taken)]
        elif name == "split":
            lengths = [min(args[1], size - start) for start in range(0, size, args[1])]
        else:
            lengths = args[1]
        pieces = []
        for length in lengths:
            if length % rows:
                raise LookupError
            of = kind if length == size else self.behind(length // rows, kind)
            sizes = list(other.shape)
            sizes[dim] = length // of.mine * of.size
            pieces.append(meta_of(tensor, sizes))
        return pieces
