"""Gradients of microbatches are added in one binary tree, whatever process holds which: the same bits at any size.

The tree is fixed by the number of microbatches alone. A rank adds what lies wholly in its own share while it
computes. What is left, at most two partial sums for each power of two, is exchanged after its last microbatch: every
rank gets its part of each vector (all-to-all), adds along the tree, and all parts are put together (all-gather).
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
from samestep.train.step import Share, cut

Vectors = list[torch.Tensor]
Block = tuple[int, int]  # the sum of 2**level neighbouring microbatches: level, and its number among such
_BUCKET_BYTES = 32 << 20
# torch 2.13 gave the function a new name and warns of the old one.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@cache
def layout(count: int, size: int) -> list[list[Block]]:
    """For each rank the blocks that are left of its share of count microbatches, in the order of microbatches."""
    shares = (range(*cut(count, size, rank)) for rank in range(size))
    left = (added({(0, index): None for index in share}, count, lambda *_: None) for share in shares)
    return [sorted(blocks, key=lambda block: block[1] << block[0]) for blocks in left]


def add_up(own: Mapping[Block, torch.Tensor], like: torch.Tensor, count: int) -> torch.Tensor:
    """Collective. The sum over count microbatches; `own` are this rank's blocks of it, flat and as long as like."""
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
    """A model's gradients in a step of microbatches; its floating-point buffers move by the mean of all their changes.

    Buffers that count, such as BatchNorm's number of batches, take one microbatch's step.
    """

    def __init__(self, model: torch.nn.Module, group: Group, *, sums: bool) -> None:
        self._group, self._sums = group, sums
        self._model = model
        # By name: a forward that writes `self.mean = …` puts another tensor there. What counts comes last.
        places = {
            buffer: (module, name)
            for module in model.modules()
            for name, buffer in module.named_buffers(recurse=False)
        }
        self._places = [
            places[buffer] for buffer in sorted(places, key=lambda found: not found.is_floating_point())
        ]
        self._floating = sum(buffer.is_floating_point() for buffer in places)
        self._blocks: dict[Block, Vectors] = {}
        self._used: list[bool] = []
        self.called = False
        self.exchange_s = 0.0

    def microbatch_begins(self, share: Share) -> None:
        """Gradients and buffers begin anew in each; what was there before the step comes back after it."""
        if not share.first:
            return
        self._blocks = {}
        self._parameters = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        self.called, self._used = False, [False] * len(self._parameters)
        self._earlier = [parameter.grad for parameter in self._parameters]
        self._held = self._buffers()
        self._before = self._values(self._held)
        self._counts_before = [buffer.clone() for buffer in self._held[self._floating :]]
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def microbatch_ends(self, share: Share) -> None:
        assert share.microbatch is not None
        found, part = self._buffers(), share.mine / share.all
        gradients = self._take_gradients(float(not share.lent) if self._sums else part, lent=share.lent)
        if not share.lent:
            change = (self._values(found) - self._before) * part
            self._blocks[0, share.microbatch] = [change, *gradients]
            self._blocks = added(self._blocks, share.microbatches, _add)
        self._bring_back(self._before)
        counts = found[self._floating :] if share.last else self._counts_before
        if counts:
            torch._foreach_copy_(self._held[self._floating :], counts)
        for (module, name), buffer in zip(self._places, self._held, strict=True):
            setattr(module, name, buffer)

    @property
    def used(self) -> str:
        """For each parameter 1 where it got a gradient in this step, else 0; nothing where the model took no part."""
        return "".join(str(int(used)) for used in self._used) if self.called or any(self._used) else ""

    @torch.no_grad()
    def step_ends(self, share: Share, used: Sequence[str]) -> None:
        """Collective where a rank used the model: parameters get everyone's gradients, and buffers their changes."""
        totals: Vectors = [torch.zeros_like(self._before), *self._parameters]
        if used:
            began = time.perf_counter()
            alone = self._group.world.size == 1
            totals = self._blocks.popitem()[1] if alone else self._exchanged(share.microbatches)
            self.exchange_s = time.perf_counter() - began
        self._bring_back(self._before + totals[0])
        for at, (parameter, total, earlier) in enumerate(
            zip(self._parameters, totals[1:], self._earlier, strict=True)
        ):
            new = total if any(flags[at] == "1" for flags in used) else None
            parameter.grad = new if earlier is None else earlier if new is None else earlier + new
        self._earlier = []

    def _exchanged(self, count: int) -> Vectors:
        """Collective. The sums over the blocks of all ranks."""
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
        for at, parameter in enumerate(self._parameters):
            gradient = parameter.grad
            self._used[at] |= gradient is not None and not lent
            taken.append(torch.zeros_like(parameter) if gradient is None else gradient.detach())
            parameter.grad = None
        return list(torch._foreach_mul(taken, weight)) if taken else []

    def _buffers(self) -> Vectors:
        return [getattr(module, name) for module, name in self._places]

    def _values(self, buffers: Vectors) -> torch.Tensor:
        """What the floating-point ones hold, as one tensor: a few operations whatever the number of layers."""
        device = self._group.world.device
        flat = [moved(buffer.reshape(-1), device) for buffer in buffers[: self._floating]]
        return (torch.cat(flat) if flat else torch.empty(0, device=device)).to(widest(device))

    def _bring_back(self, values: torch.Tensor) -> None:
        held = self._held[: self._floating]
        parts = torch.split(values, [buffer.numel() for buffer in held])
        if held:
            torch._foreach_copy_(
                held, [part.view_as(buffer) for part, buffer in zip(parts, held, strict=True)]
            )


def _add(left: Vectors, right: Vectors) -> Vectors:
    """Into the memory of the left ones, by type: CUDA launches a kernel for each tensor where a list has several."""
    kinds: dict[Any, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for pair in zip(left, right, strict=True):
        kinds.setdefault((pair[0].dtype, pair[0].device), []).append(pair)
    for pairs in kinds.values():
        torch._foreach_add_(*map(list, zip(*pairs, strict=True)))
    return left


def _flat(tensors: Vectors) -> torch.Tensor:
    return torch.cat([(torch.view_as_real(one) if one.is_complex() else one).reshape(-1) for one in tensors])


def _buckets(tensors: Vectors) -> list[tuple[int, int]]:
    """Where neighbours of one type, on one device, of so many bytes together, begin and end."""
    buckets: list[tuple[int, int]] = []
    kind, room = None, 0
    for at, tensor in enumerate(tensors):
        if kind != (kind := (tensor.dtype, tensor.device)) or room < tensor.nbytes:
            buckets.append((at, at))
            room = _BUCKET_BYTES
        room -= tensor.nbytes
        buckets[-1] = buckets[-1][0], at + 1
    return buckets
