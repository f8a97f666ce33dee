"""Which part of a whole batch's random draw is this rank's."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from samestep.train.batch_sizes import Place
from samestep.train.step import Rows, Share
from samestep.train.views import layout_of

# what is drawn, its dimensions, and the calls from the script's line down to it
Line = tuple[str, int, tuple[Any, ...]]
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
        # the strides of a share of one sample do not tell how the whole batch lies in memory
        layout, found = layout_of(tensor), self.layout
        wide = [[dim for dim in order if tensor.shape[dim] > 1] for order in (layout, found)]
        if found and wide[0] == wide[1]:
            layout = found
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


# one draw for all ranks, of which each has all
FOR_ALL = Part(-1, Rows(0, 0, 0))


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
    if place.dim is None:
        return FOR_ALL
    ragged = share.of.ragged.get(place.ragged)
    rows = ragged.rows if ragged else share.rows
    times, rest = divmod(shape[place.dim], rows.mine)
    if rest or (place.before * place.after == 1) != (times == 1) or bool(place.ragged) != bool(ragged):
        return None
    # the size ahead of the batch, or where there is none that behind it, may be another than where it was found
    return Part(place.dim, rows, times if place.before == 1 else place.after, place.layout)


def of_permutation(whole: Any, rows: Rows) -> Any:
    """Of a permutation of the whole batch, that of this rank's rows."""
    return whole[(whole >= rows.start) & (whole < rows.start + rows.mine)] - rows.start


class Places:
    """Where draws have the batch: by their line, and by the kind of the model's call, which begins with the model.

    Several layers may draw at one line of a model, each with other sizes.
    """

    def __init__(self) -> None:
        self._by_line: dict[Line, dict[Any, list[tuple[torch.Size, Place]]]] = {}

    def note(self, line: Line, kind: Any, shape: torch.Size, place: Place | None) -> None:
        """What was found in a call; what an earlier one showed stays where this one shows nothing."""
        found = self._by_line.setdefault(line, {}).setdefault(kind, [])
        if place is not None and (shape, place) not in found:
            found.append((shape, place))

    def has(self, line: Line, kind: Any) -> bool:
        return kind in self._by_line.get(line, ())

    def part(self, line: Line, kind: Any, shape: torch.Size, share: Share) -> Part | None:
        """This rank's, by the place that was found for this shape, but for the batch, or else one that fits it."""
        kinds = self._by_line.get(line, {})
        # a checkpointed segment draws again in backward, beside the call
        found = kinds.get(kind, []) if kind else [one for some in kinds.values() for one in some]
        fits = [(of, one, part) for of, one in found if (part := part_at(one, shape, share))]

        def unlike(fit: tuple[torch.Size, Place, Part]) -> int:
            of, place, _ = fit
            return 0 if _beside(place, of) == _beside(place, shape) else 1 + (place.dim is None)

        return min(fits, key=unlike)[2] if fits else None


def _beside(place: Place, shape: torch.Size) -> list[int]:
    """The sizes beside the batch."""
    return [size for dim, size in enumerate(shape) if dim != place.dim]
