"""Which part of a whole batch's random draw is this rank's."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from samestep.train.batch_places import Place
from samestep.train.step import Share

Memory = dict[tuple[torch.dtype, torch.device], torch.Tensor]


@dataclass(frozen=True)
class Part:
    """Which part of a whole draw is this rank's: along `dim`, `length` of `whole` from `start`, or those `rows`."""

    dim: int
    start: int
    length: int
    whole: int
    rows: torch.Tensor | None = None
    layout: tuple[int, ...] = ()

    def of(self, drawn: torch.Tensor) -> torch.Tensor:
        if self.rows is not None:
            return drawn.index_select(self.dim, self.rows.to(drawn.device))
        return drawn.narrow(self.dim, self.start, self.length)

    def enlarged(
        self, tensor: torch.Tensor, fill: float | None = None, memory: Memory | None = None
    ) -> torch.Tensor:
        """A tensor of the whole draw's size, laid out in memory like this one; with fill, around its values."""
        sizes = list(tensor.shape)
        sizes[self.dim] = self.whole
        strides = tensor.stride()
        # the strides of a share of one sample do not tell how the whole batch lies in memory
        layout = self.layout or sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim))
        if memory is not None:
            return _in_memory(memory, sizes, layout, tensor)
        whole = torch.empty_permuted(sizes, layout, dtype=tensor.dtype, device=tensor.device)
        if fill is not None:
            whole.fill_(fill)
            if self.rows is None:
                self.of(whole).copy_(tensor)
            else:
                whole.index_copy_(self.dim, self.rows.to(tensor.device), tensor)
        return whole


def _in_memory(
    memory: Memory, sizes: Sequence[int], layout: Sequence[int], like: torch.Tensor
) -> torch.Tensor:
    """A tensor in memory that is kept: fresh memory of this size costs as much as a part of the draw."""
    count = math.prod(sizes)
    kept = memory.get((like.dtype, like.device))
    if kept is None or kept.numel() < count:
        kept = memory[like.dtype, like.device] = torch.empty(count, dtype=like.dtype, device=like.device)
    found = kept[:count].view([sizes[dim] for dim in layout])
    return found.permute([layout.index(dim) for dim in range(len(layout))])


def ragged_part(place: Place, shape: torch.Size, share: Share) -> Part | None:
    """The same of a draw for each node of graphs, each word of texts laid end to end and the like."""
    found = next((one for one in share.of.ragged if one.name == place.ragged), None)
    dim, times = place.dim, place.after
    if found is None or dim is None or shape[dim] != found.mine * times:
        return None
    return Part(dim, found.start * times, shape[dim], found.all * times, layout=place.layout)


def part_at(place: Place, shape: torch.Size, share: Share) -> Part | None:
    """This rank's part of a draw that has the batch in that place; None where a draw of this shape cannot."""
    assert place.dim is not None
    times, rest = divmod(shape[place.dim], share.mine)
    if rest or (place.before * place.after == 1) != (times == 1):
        return None
    start, length, layout = share.start - share.batch_start, shape[place.dim], place.layout
    if place.before == 1:
        return Part(place.dim, start * times, length, share.all * times, layout=layout)
    # the length before the batch may be another than where the place was found
    rows = torch.arange(share.all * times, device="cpu").view(-1, share.all, place.after)
    return Part(
        place.dim, 0, length, share.all * times, rows[:, start : start + share.mine].reshape(-1), layout
    )
