"""Sizes that stand for a batch, so that a batch dimension is told from another dimension of the same size.

A *probe* is a tensor without values, on torch's meta device. It goes through the operations of a real tensor with
another batch size. Example: this rank has 8 samples, and `x` has shape (8, 8). The probe of `x` has (7919, 8), so the
first dimension is the batch and the second is not. The probe of `x.t()` has (8, 7919): there the batch is the second.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from samestep.train.batch.views import meta_of
from samestep.train.loss import Averaged
from samestep.train.passes import Rows, Share

# Primes, because no product of layer sizes equals a prime. _SAMPLES stands for samples, _RAGGED for rows that are not
# samples (nodes of graphs), _MERGED for samples merged with a dimension before them: a view of (length * batch, …).
_SAMPLES = 7919
_RAGGED = (7841, 7853, 7867, 7873, 7877, 7879, 7883, 7901, 7907)
_MERGED = (7927, 7933, 7937, 7949, 7951, 7963, 7993, 8009, 8011, 8017)
_CUTS = {"slice", "split", "split_with_sizes"}


@dataclass(frozen=True)
class Place:
    """Where a tensor has the batch."""

    # dim: the dimension, None where the tensor is the same on all ranks. before, after: the sizes that are merged with
    # the batch into that dimension, before and after it. layout: the dimensions in the order of memory. ragged: where
    # the rows are not samples, such as nodes of graphs: the name of a batch's tensor with the same rows.

    dim: int | None
    before: int = 1
    after: int = 1
    layout: tuple[int, ...] = ()
    ragged: str = ""


class BatchSize(NamedTuple):
    """The prime that stands for this rank's `mine` samples, or for its `ragged` rows, behind a merged size `before`."""

    prime: int
    mine: int
    before: int = 1
    ragged: str = ""


Order = tuple[int, ...] | None


class Traced(NamedTuple):
    """A tensor and what is known of it."""

    # probe: the same tensor at another batch size, None where that is not known; if not `sure`, it is a guess.
    # averaged: how the tensor depends on averages over this rank's samples, None where it does not. order: the samples
    # in the tensor, if they are not all there in the batch's order; a single index where the tensor is one sample
    # without a batch dimension. None: random numbers, which may be of samples in any order.

    tensor: torch.Tensor
    probe: torch.Tensor | None
    sure: bool = True
    averaged: Averaged | None = None
    order: Order = ()

    @property
    def has_batch(self) -> bool:
        return isinstance(self.probe, torch.Tensor) and self.probe.shape != self.tensor.shape

    @property
    def is_constant(self) -> bool:
        """Whether it is certain that no dimension is the batch's."""
        return self.sure and self.probe is not None and not self.has_batch


def _unless_in_order(rows: Iterable[int]) -> tuple[int, ...]:
    order = tuple(rows)
    return () if order == tuple(range(len(order))) else order


def stands_for_samples(size: int) -> bool:
    """Whether a size in a probe stands for samples, and not for ragged rows."""
    return any(size and size % probe == 0 for probe in (_SAMPLES, *_MERGED))


class BatchSizes:
    """The batch sizes in a call: of the samples, of ragged rows, and of samples merged with a dimension before them."""

    def __init__(self, share: Share) -> None:
        self.samples = BatchSize(_SAMPLES, share.mine)
        # tensors with equal rows share a prime: a graph's nodes, and the number of the graph that each is in
        self._ragged = share.of.ragged
        names = {
            ragged.rows: name for name, ragged in reversed(self._ragged.items()) if ragged.rows != share.rows
        }
        self.ragged = {
            rows: BatchSize(size, rows.mine, 1, name)
            for size, (rows, name) in zip(_RAGGED, names.items(), strict=False)
        }
        self._all = [self.samples, *self.ragged.values()]

    def probes(self) -> dict[int, int]:
        """For each size of a batch dimension on this rank, its size in a probe."""
        return {batch.before * batch.mine: batch.before * batch.prime for batch in reversed(self._all)}

    def at(self, place: Place) -> BatchSize:
        """The batch size at a place, which may have been found in an earlier batch."""
        ragged = self._ragged.get(place.ragged)
        return self.merged(
            place.before, self.ragged.get(ragged.rows, self.samples) if ragged else self.samples
        )

    def in_probe(self, size: int) -> list[BatchSize]:
        return [batch for batch in self._all if size and size % batch.prime == 0]

    def batch_in(self, tensor: torch.Tensor, probe: torch.Tensor) -> tuple[int, BatchSize] | None:
        """The dimension of the batch, None where there is none; LookupError where the probe does not fit the tensor."""
        differing = [dim for dim in range(tensor.dim()) if tensor.shape[dim] != probe.shape[dim]]
        if not differing:
            return None
        dim = differing[0]
        for batch in self.in_probe(probe.shape[dim]):
            if len(differing) == 1 and probe.shape[dim] // batch.prime * batch.mine == tensor.shape[dim]:
                return dim, batch
        raise LookupError

    def fits(self, tensor: torch.Tensor, probe: Any) -> bool:
        """Whether a tensor and a probe have the same dimensions, but for the batch."""
        if not isinstance(probe, torch.Tensor) or probe.dim() != tensor.dim():
            return False
        with suppress(LookupError):
            self.batch_in(tensor, probe)
            return True
        return False

    def reordered(
        self, name: str, args: Sequence[Any], result: Any, traced: Callable[[torch.Tensor], Traced]
    ) -> tuple[torch.Tensor, tuple[int, ...]] | None:
        """The probe and the samples' order where an operation permutes, stacks or selects samples, else None."""
        if name in ("flip", "roll"):
            return self._flipped(name, traced(args[0]), *args[1:])
        if name == "stack":
            return self._stacked(result, [traced(index).order or () for index in args[0]], *args[1:])
        if name in ("select", "index_select"):
            dim, rows = args[1] % args[0].dim(), args[2]
        elif name == "index" and sum(index is not None for index in args[1]) == 1:
            dim, rows = next((dim, index) for dim, index in enumerate(args[1]) if index is not None)
        else:
            return None
        source, count = traced(args[0]), self.samples.mine
        with suppress(LookupError):
            if source.probe is None or self._dim_of_samples(source) != dim:
                return None
            if name == "select":
                return (meta_of(result), ((source.order or range(count))[rows],)) if source.sure else None
            # a tensor that is filled piece by piece, as pad_packed_sequence does, has samples in an unknown order
            are_numbers = not rows.is_floating_point() and rows.dtype != torch.bool
            if source.sure and are_numbers and rows.shape == (count,):
                return source.probe, _unless_in_order(
                    (source.order or range(count))[row] for row in rows.tolist()
                )
        return None

    def _flipped(
        self, name: str, source: Traced, by: Any, dims: Sequence[int] = ()
    ) -> tuple[torch.Tensor, tuple[int, ...]] | None:
        """The same of flip and roll."""
        dim = self._dim_of_samples(source)
        turned = [dim % source.tensor.dim() for dim in (by if name == "flip" else dims)]
        if source.probe is None or dim is None or dim not in turned:
            return None
        rows = list(source.order or range(self.samples.mine))
        start = -by[turned.index(dim)] % len(rows) if name == "roll" else 0
        return source.probe, _unless_in_order(rows[::-1] if name == "flip" else rows[start:] + rows[:start])

    def _dim_of_samples(self, traced: Traced) -> int | None:
        """The dimension in which each sample is once; None where there is none."""
        with suppress(LookupError):
            if traced.probe is not None and (place := self.batch_in(traced.tensor, traced.probe)):
                return place[0] if place[1] == self.samples else None
        return None

    def _stacked(
        self, result: torch.Tensor, orders: Sequence[tuple[int, ...]], dim: int = 0
    ) -> tuple[torch.Tensor, tuple[int, ...]] | None:
        """The same of stack, where it makes a batch dimension of all single samples."""
        rows, count = [order[0] for order in orders if len(order) == 1], self.samples.mine
        if len(orders) != count or sorted(rows) != list(range(count)):
            return None
        sizes = list(result.shape)
        sizes[dim] = self.samples.prime
        return meta_of(result, sizes), _unless_in_order(rows)

    def merged(self, before: int, batch: BatchSize) -> BatchSize:
        """This batch size with a size `before` merged in front of it; LookupError for ragged rows."""
        if batch.before == before:
            return batch
        if batch.ragged:
            raise LookupError
        sizes = [size for size in self._all if not size.ragged]
        for size in sizes:
            if size.before == before:
                return size
        self._all.append(self.samples._replace(prime=_MERGED[len(sizes) - 1 :][0], before=before))
        return self._all[-1]

    def run(self, func: Any, args: Sequence[Any], probes: list[Any], kwargs: Any) -> Any:
        """The result of the operation on probes; LookupError where it takes only some of the samples."""
        name = func._opname
        if name in _CUTS and (pieces := self._pieces(name, args[0], probes[0], args)):
            return pieces[0] if name == "slice" else pieces
        if name == "native_group_norm":
            probes[3] = probes[0].shape[0]
        elif name == "affine_grid_generator":
            probes[1] = [probes[0].shape[0], *probes[1][1:]]
        elif name == "bmm" and self.samples.mine == 1 and probes[0].shape[2] != args[0].shape[2]:
            raise LookupError  # einsum lays a size of 1 into any other, so this need not be a sum over the samples
        result = func(*probes, **kwargs)
        return self._concatenated(result, args[0], probes[0], *args[1:]) if name == "cat" else result

    def _concatenated(
        self, cat: torch.Tensor, parts: Sequence[torch.Tensor], probes: Sequence[torch.Tensor], dim: int = 0
    ) -> torch.Tensor:
        """The probe of concatenated tensors, each of which may have the whole batch."""
        dim %= cat.dim()
        places = [self.batch_in(part, probe) for part, probe in zip(parts, probes, strict=True)]
        batches = [place[1] for place in places if place is not None and place[0] == dim]
        if not batches or any(batch.ragged for batch in batches):
            return cat
        rows = {part.shape[dim] // batch.before for part, batch in zip(parts, batches, strict=False)}
        if len(batches) < len(parts) or len(rows) > 1:
            raise LookupError
        batch = self.merged(sum(part.before for part in batches), batches[0])
        sizes = list(cat.shape)
        sizes[dim] = batch.before * rows.pop() // batch.mine * batch.prime
        return meta_of(cat, sizes)

    def _pieces(
        self, name: str, tensor: torch.Tensor, probe: torch.Tensor, args: Sequence[Any]
    ) -> list[torch.Tensor]:
        """The probes of pieces that each have all samples; none where the operation does not cut the batch dimension.

        LookupError where a piece has only some of the samples: ranks would get different pieces.
        """
        dim = int((*args[1 if name == "slice" else 2 :], 0)[0]) % tensor.dim()
        place = self.batch_in(tensor, probe)
        if place is None or place[0] != dim:
            return []
        size, batch = tensor.shape[dim], place[1]
        rows = size // batch.before
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
            piece = batch if length == size else self.merged(length // rows, batch)
            sizes = list(probe.shape)
            sizes[dim] = length // piece.mine * piece.prime
            pieces.append(meta_of(tensor, sizes))
        return pieces


def draws_whole(func: Any, operands: Sequence[Traced], result: Any, rows: Rows) -> bool:
    """Whether an operation draws as many rows as the whole batch has, as torch.randn(64, 100) does for a generator."""
    if torch.Tag.nondeterministic_seeded not in func.tags or any(
        old.tensor is not result for old in operands
    ):
        return False
    is_noise = isinstance(result, torch.Tensor) and result.dim() > 1 and not result.requires_grad
    return is_noise and result.shape[0] == rows.all != rows.mine
