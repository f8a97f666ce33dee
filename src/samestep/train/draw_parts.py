"""Which part of a whole batch's random draw is this rank's."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from samestep.train.batch_places import Place
from samestep.train.step import Rows, Share

Memory = dict[tuple[torch.dtype, torch.device], torch.Tensor]


@dataclass(frozen=True)
class Part:
    """This rank's rows of a whole draw, along `dim`; one row of the batch is `after` elements of that dimension.

    Ahead of the batch in that dimension may be another one. With `chosen` it is these elements, of `rows.all`.
    """

    dim: int
    rows: Rows
    after: int = 1
    layout: tuple[int, ...] = ()
    chosen: torch.Tensor | None = None

    def of(self, drawn: torch.Tensor) -> torch.Tensor:
        if self.chosen is not None:
            return drawn.index_select(self.dim, self.chosen.to(drawn.device))
        return self._mine_in(drawn).flatten(self.dim, self.dim + 2)

    def _mine_in(self, drawn: torch.Tensor) -> torch.Tensor:
        return self._split(drawn, self.rows.all).narrow(self.dim + 1, self.rows.start, self.rows.mine)

    def _split(self, tensor: torch.Tensor, rows: int) -> torch.Tensor:
        """With a dimension of their own for these rows."""
        before, after = tensor.shape[: self.dim], tensor.shape[self.dim + 1 :]
        return tensor.view(*before, -1, rows, self.after, *after)

    def enlarged(
        self, tensor: torch.Tensor, fill: float | None = None, memory: Memory | None = None
    ) -> torch.Tensor:
        """A tensor of the whole draw's size, laid out in memory like this one; with fill, around its values."""
        sizes = list(tensor.shape)
        sizes[self.dim] = sizes[self.dim] // self.rows.mine * self.rows.all
        strides = tensor.stride()
        # the strides of a share of one sample do not tell how the whole batch lies in memory
        layout = self.layout or sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim))
        if memory is not None:
            return _in_memory(memory, sizes, layout, tensor)
        whole = torch.empty_permuted(sizes, layout, dtype=tensor.dtype, device=tensor.device)
        if fill is None:
            return whole
        whole.fill_(fill)
        if self.chosen is not None:
            return whole.index_copy_(self.dim, self.chosen.to(tensor.device), tensor)
        self._mine_in(whole).copy_(self._split(tensor, self.rows.mine))
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


def part_at(place: Place, shape: torch.Size, share: Share) -> Part | None:
    """This rank's part of a draw that has the batch in that place; None where a draw of this shape cannot."""
    assert place.dim is not None
    ragged = share.of.ragged.get(place.ragged)
    rows = ragged.rows if ragged else share.rows
    times, rest = divmod(shape[place.dim], rows.mine)
    if rest or (place.before * place.after == 1) != (times == 1) or bool(place.ragged) != bool(ragged):
        return None
    # the size ahead of the batch, or where there is none that behind it, may be another than where it was found
    return Part(place.dim, rows, times if place.before == 1 else place.after, place.layout)
