"""Which part of a whole batch's random draw is this rank's.

Example: a draw of shape (5, 4, 3) has this rank's 4 samples in dimension 1, and they are samples 8 to 11 of 16. The
whole draw is (5, 16, 3), and this rank's part is Part(1, Rows(mine=4, start=8, all=16)).
"""

import itertools
from dataclasses import dataclass
from typing import Any

import torch

from samestep.train.batch.sizes import Place
from samestep.train.batch.views import layout_of
from samestep.train.passes import Rows, Share

# what is drawn, its dimensions, and the calls from the script's line down to it
Line = tuple[str, int, tuple[Any, ...]]


@dataclass(frozen=True)
class Part:
    """This rank's rows of a whole draw, along `dim`; each row is `after` elements of that dimension."""

    # Another dimension may be merged before the batch. With `chosen` the part is these elements, out of `rows.all`.

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
        """A view in which the rows have a dimension of their own, dim + 1."""
        before, after = tensor.shape[: self.dim], tensor.shape[self.dim + 1 :]
        return tensor.view(*before, -1, rows, self.after, *after)

    def enlarged(self, tensor: torch.Tensor, fill: float | None = None) -> torch.Tensor:
        """A tensor of the whole draw's size; with `fill` it has these values in this rank's part, `fill` elsewhere."""
        sizes = list(tensor.shape)
        sizes[self.dim] = sizes[self.dim] // self.rows.mine * self.rows.all
        whole = torch.empty_permuted(sizes, self._layout(tensor), dtype=tensor.dtype, device=tensor.device)
        if fill is None:
            return whole
        whole.fill_(fill)
        if self.chosen is not None:
            return whole.index_copy_(self.dim, self.chosen.to(tensor.device), tensor)
        self._mine_in(whole).copy_(self._split(tensor, self.rows.mine))
        return whole

    def _layout(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """The whole draw's dimensions as they lie in memory; strides of a share of one sample do not tell it."""
        layout, known = layout_of(tensor), self.layout
        wide = [[dim for dim in order if tensor.shape[dim] > 1] for order in (layout, known)]
        return known if known and wide[0] == wide[1] else layout

    def pieces(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int, int] | None:
        """The tensor as rows that are adjacent in the whole draw, and how many values come before and after each."""
        if self.chosen is not None:
            return None
        order = [at + 2 * (at > self.dim) for at in self._layout(tensor)]
        at = order.index(self.dim) + 1
        in_memory = self._split(tensor, self.rows.mine).permute(
            *order[:at], self.dim + 1, self.dim + 2, *order[at:]
        )
        if not in_memory.is_contiguous():
            return None
        row = in_memory[(0,) * (at + 1)].numel()
        mine, start, all = self.rows.mine, self.rows.start, self.rows.all
        return in_memory.view(-1, mine * row), start * row, (all - start - mine) * row


# for a draw without a batch dimension: all ranks make the same draw and use all of it
FOR_ALL = Part(-1, Rows(0, 0, 0))


@dataclass(frozen=True)
class Packed:
    """This rank's rows, and its sequences in the order of their lengths, of the whole batch's packed sequence."""

    rows: Part
    sequences: Part
    batch_sizes: list[int]

    def rows_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A view with the rows in dimension 0; torch gives time a dimension where all sequences are equally long."""
        is_split = tensor.dim() == 3 and tensor.shape[:2].numel() == self.rows.rows.mine
        return tensor.flatten(0, 1) if is_split and tensor.is_contiguous() else tensor


def part_at(place: Place, shape: torch.Size, share: Share) -> Part | None:
    """This rank's part of a draw that has the batch in that place; None where the shape does not fit the place."""
    if place.dim is None:
        return FOR_ALL
    ragged = share.of.ragged.get(place.ragged)
    rows = ragged.rows if ragged else share.rows
    times, rest = divmod(shape[place.dim], rows.mine)
    if rest or (place.before * place.after == 1) != (times == 1) or bool(place.ragged) != bool(ragged):
        return None
    # the size merged before the batch, or else that after it, may have changed since the place was found
    return Part(place.dim, rows, times if place.before == 1 else place.after, place.layout)


def of_permutation(whole: Any, rows: Rows) -> Any:
    """The order of this rank's rows in a permutation of the whole batch."""
    return whole[(whole >= rows.start) & (whole < rows.start + rows.mine)] - rows.start


class Places:
    """Where draws have the batch, by line and by kind of the model's call; layers may share a line."""

    def __init__(self) -> None:
        self._by_line: dict[Line, dict[Any, list[tuple[torch.Size, Place]]]] = {}

    def note(self, line: Line, kind: Any, shape: torch.Size, place: Place | None) -> None:
        """Add the place that a call has shown, None where it has shown nothing; earlier places stay."""
        places = self._by_line.setdefault(line, {}).setdefault(kind, [])
        if place is not None and (shape, place) not in places:
            places.append((shape, place))

    def has(self, line: Line, kind: Any) -> bool:
        return kind in self._by_line.get(line, ())

    def part(self, line: Line, kind: Any, shape: torch.Size, share: Share) -> Part | None:
        """This rank's part, by the place of a draw whose other sizes were the same, or else by a place that fits."""
        kinds = self._by_line.get(line, {})
        # a checkpointed segment draws again in backward, outside of a call
        places = kinds.get(kind, []) if kind else list(itertools.chain(*kinds.values()))
        fits = [(seen, place, part) for seen, place in places if (part := part_at(place, shape, share))]

        def unlike(fit: tuple[torch.Size, Place, Part]) -> int:
            seen, place, _ = fit
            return 0 if _others(place, seen) == _others(place, shape) else 1 + (place.dim is None)

        return min(fits, key=unlike)[2] if fits else None


def _others(place: Place, shape: torch.Size) -> list[int]:
    return [size for dim, size in enumerate(shape) if dim != place.dim]
