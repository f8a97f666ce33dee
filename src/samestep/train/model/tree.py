"""Adds the gradients of microbatches in a fixed binary tree, so that every number of ranks gives the same bits.

The tree depends only on the number of microbatches. Example: 4 microbatches give (g0 + g1) + (g2 + g3). With 2 ranks,
rank 0 computes g0 + g1 and rank 1 computes g2 + g3. With 3 ranks, rank 0 computes g0 + g1, and g2 and g3 are sent.
A rank adds the blocks that lie in its own share. At most two partial sums for each power of two are left. After the
last microbatch every rank gets its part of these vectors (all-to-all), adds them along the tree, and gathers all parts.
"""

import time
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from samestep.train.group.census import added
from samestep.train.group.device import moved, widest
from samestep.train.group.group import Group
from samestep.train.passes import Share, cut

Vectors = list[torch.Tensor]
Block = tuple[int, int]  # the sum of 2**level neighbouring microbatches: level, and its number among such
_BUCKET_BYTES = 32 << 20
# torch 2.13 renamed the function and warns of the old name
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@cache
def layout(count: int, size: int) -> list[list[Block]]:
    """For each rank, the blocks to which it can add up its share of count microbatches, in their order."""
    shares = (range(*cut(count, size, rank)) for rank in range(size))
    left = (added({(0, index): None for index in share}, count, lambda *_: None) for share in shares)
    return [sorted(blocks, key=lambda block: block[1] << block[0]) for blocks in left]


def add_up(own: Mapping[Block, torch.Tensor], like: torch.Tensor, count: int) -> torch.Tensor:
    """Collective. The sum over count microbatches; `own` are this rank's blocks, as flat as `like`."""
    size, length = dist.get_world_size(), like.numel()
    if not length:
        return like
    ranks, chunk = layout(count, size), -(-length // size)
    mine = ranks[dist.get_rank()]
    sent = like.new_zeros(len(mine), size * chunk)
    for row, block in zip(sent, mine, strict=True):
        row[:length] = own[block]
    by_rank = sent.view(len(mine), size, chunk).transpose(0, 1).contiguous()
    received = like.new_empty(sum(map(len, ranks)) * chunk)
    counts = [len(blocks) * chunk for blocks in ranks]
    dist.all_to_all_single(received, by_rank.view(-1), counts, [len(mine) * chunk] * size)
    parts = dict(zip(chain(*ranks), torch.split(received, chunk), strict=True))
    (part,) = added(parts, count, torch.Tensor.add_).values()
    total = like.new_empty(size * chunk)
    _all_gather(total, part.contiguous())
    return total[:length]


class Tree:
    """Collects a model's gradients in a step of microbatches."""

    # Every microbatch starts with the buffers from before the step. After the step, floating-point buffers have changed
    # by the mean of the microbatches' changes, and integer buffers (BatchNorm's number of batches) as in one
    # microbatch.

    def __init__(self, model: torch.nn.Module, group: Group, *, sums: bool) -> None:
        self._group, self._sums = group, sums
        self._model = model
        # by name, since a forward that writes `self.mean = …` replaces the tensor; integer buffers come last
        places = {
            buffer: (module, name)
            for module in model.modules()
            for name, buffer in module.named_buffers(recurse=False)
        }
        self._places = [
            places[buffer] for buffer in sorted(places, key=lambda buffer: not buffer.is_floating_point())
        ]
        self._floating = sum(buffer.is_floating_point() for buffer in places)
        self._blocks: dict[Block, Vectors] = {}
        self._used: list[bool] = []
        self.called = False
        self.exchange_s = 0.0

    def microbatch_begins(self, share: Share) -> None:
        """In a step's first microbatch, put aside the gradients and buffers from before the step."""
        if not share.first:
            return
        self._blocks = {}
        self._parameters = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        self.called, self._used = False, [False] * len(self._parameters)
        self._earlier = [parameter.grad for parameter in self._parameters]
        self._buffers_before = self._buffers()
        self._before = self._values(self._buffers_before)
        self._counts_before = [buffer.clone() for buffer in self._buffers_before[self._floating :]]
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def microbatch_ends(self, share: Share) -> None:
        assert share.microbatch is not None
        buffers, part = self._buffers(), share.mine / share.all
        gradients = self._take_gradients(float(not share.lent) if self._sums else part, lent=share.lent)
        if not share.lent:
            change = (self._values(buffers) - self._before) * part
            self._blocks[0, share.microbatch] = [change, *gradients]
            self._blocks = added(self._blocks, share.microbatches, _add)
        self._restore(self._before)
        counts = buffers[self._floating :] if share.last else self._counts_before
        if counts:
            torch._foreach_copy_(self._buffers_before[self._floating :], counts)
        for (module, name), buffer in zip(self._places, self._buffers_before, strict=True):
            setattr(module, name, buffer)

    @property
    def used(self) -> str:
        """For each parameter 1 if it got a gradient in this step, else 0; "" if the model was not used."""
        return "".join(str(int(used)) for used in self._used) if self.called or any(self._used) else ""

    @torch.no_grad()
    def step_ends(self, share: Share, used: Sequence[str]) -> None:
        """Collective if a rank used the model. Set the parameters' gradients and the buffers to those of all ranks."""
        totals: Vectors = [torch.zeros_like(self._before), *self._parameters]
        if used:
            began = time.perf_counter()
            alone = self._group.world.size == 1
            totals = self._blocks.popitem()[1] if alone else self._exchanged(share.microbatches)
            self.exchange_s = time.perf_counter() - began
        self._restore(self._before + totals[0])
        for index, (parameter, total, earlier) in enumerate(
            zip(self._parameters, totals[1:], self._earlier, strict=True)
        ):
            new = total if any(flags[index] == "1" for flags in used) else None
            parameter.grad = new if earlier is None else earlier if new is None else earlier + new
        self._earlier = []

    def _exchanged(self, count: int) -> Vectors:
        """Collective. The sum of all ranks' blocks, for each vector."""
        totals: Vectors = []
        like = [self._before, *self._parameters]
        with self._group.within("exchange"):
            for first, end in _buckets(like):
                sizes = [tensor.numel() * (1 + tensor.is_complex()) for tensor in like[first:end]]
                flat = {block: _flat(vectors[first:end]) for block, vectors in self._blocks.items()}
                total = add_up(flat, _flat([like[first]]).new_empty(sum(sizes)), count)
                for tensor, values in zip(like[first:end], torch.split(total, sizes), strict=True):
                    shaped = torch.view_as_complex(values.view(-1, 2)) if tensor.is_complex() else values
                    totals.append(torch.empty_like(tensor).copy_(shaped.view(tensor.shape)))
        return totals

    def _take_gradients(self, weight: float, *, lent: bool) -> Vectors:
        taken = []
        for index, parameter in enumerate(self._parameters):
            gradient = parameter.grad
            self._used[index] |= gradient is not None and not lent
            taken.append(torch.zeros_like(parameter) if gradient is None else gradient.detach())
            parameter.grad = None
        return list(torch._foreach_mul(taken, weight)) if taken else []

    def _buffers(self) -> Vectors:
        return [getattr(module, name) for module, name in self._places]

    def _values(self, buffers: Vectors) -> torch.Tensor:
        """The values of the floating-point buffers as a flat tensor: few operations for any number of layers."""
        device = self._group.world.device
        flat = [moved(buffer.reshape(-1), device) for buffer in buffers[: self._floating]]
        return (torch.cat(flat) if flat else torch.empty(0, device=device)).to(widest(device))

    def _restore(self, values: torch.Tensor) -> None:
        floating = self._buffers_before[: self._floating]
        parts = torch.split(values, [buffer.numel() for buffer in floating])
        if floating:
            torch._foreach_copy_(
                floating, [part.view_as(buffer) for part, buffer in zip(parts, floating, strict=True)]
            )


def _add(left: Vectors, right: Vectors) -> Vectors:
    """Add into the left tensors, grouped by type: for a list of mixed types CUDA launches a kernel for each tensor."""
    kinds: dict[Any, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for pair in zip(left, right, strict=True):
        kinds.setdefault((pair[0].dtype, pair[0].device), []).append(pair)
    for pairs in kinds.values():
        torch._foreach_add_(*map(list, zip(*pairs, strict=True)))
    return left


def _flat(tensors: Vectors) -> torch.Tensor:
    real = (torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors)
    return torch.cat([tensor.reshape(-1) for tensor in real])


def _buckets(tensors: Vectors) -> list[tuple[int, int]]:
    """Ranges of neighbouring tensors of the same type and device, of about _BUCKET_BYTES each."""
    buckets: list[tuple[int, int]] = []
    kind, room = None, 0
    for index, tensor in enumerate(tensors):
        if kind != (kind := (tensor.dtype, tensor.device)) or room < tensor.nbytes:
            buckets.append((index, index))
            room = _BUCKET_BYTES
        room -= tensor.nbytes
        buckets[-1] = buckets[-1][0], index + 1
    return buckets
