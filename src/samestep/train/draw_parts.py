"""Which part of a whole batch's random draw is this rank's.

Example: a draw of shape (5, 4, 3) has this rank's 4 samples in dimension 1, and they are samples 8 to 11 of 16. The
whole draw is (5, 16, 3), and this rank's part is Part(1, Rows(mine=4, start=8, all=16)).
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from samestep.train.batch_sizes import Place
from samestep.train.passes import Rows, Share
from samestep.train.views import layout_of

# what is drawn, its dimensions, and the calls from the script's line down to it
Line = tuple[str, int, tuple[Any, ...]]
Memory = dict[tuple[torch.dtype, torch.device], torch.Tensor]
_Draw = Callable[[torch.Tensor, torch.Generator | None], object]
# these take the same count of the generator's values for every value that they draw
_STEADY = ("bernoulli_.float", "uniform_", "exponential_")
_AT_ONCE = 1 << 18


@dataclass(frozen=True)
class Part:
    """This rank's rows of a whole draw, along `dim`; each row is `after` elements of that dimension.

    Another dimension may be merged before the batch. With `chosen` the part is these elements, out of `rows.all`.
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
        """A view in which the rows have a dimension of their own, dim + 1."""
        before, after = tensor.shape[: self.dim], tensor.shape[self.dim + 1 :]
        return tensor.view(*before, -1, rows, self.after, *after)

    def enlarged(
        self, tensor: torch.Tensor, fill: float | None = None, memory: Memory | None = None
    ) -> torch.Tensor:
        """A tensor of the whole draw's size; with `fill` it has these values in this rank's part, `fill` elsewhere."""
        sizes = list(tensor.shape)
        sizes[self.dim] = sizes[self.dim] // self.rows.mine * self.rows.all
        # the strides of a share of one sample do not tell how the whole batch lies in memory
        layout, known_layout = layout_of(tensor), self.layout
        wide = [[dim for dim in order if tensor.shape[dim] > 1] for order in (layout, known_layout)]
        if known_layout and wide[0] == wide[1]:
            layout = known_layout
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

    def beside(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """How many values of the whole draw come before and after this rank's; None if this rank's are not adjacent."""
        is_one_piece = self.dim == 0 and tensor.shape[0] == self.rows.mine * self.after
        is_plain = tensor.is_contiguous() and list(self.layout) == sorted(self.layout)
        if self.chosen is not None or not (is_one_piece and is_plain):
            return None
        row = tensor.numel() // self.rows.mine
        return self.rows.start * row, (self.rows.all - self.rows.start - self.rows.mine) * row


# for a draw without a batch dimension: all ranks make the same draw and use all of it
FOR_ALL = Part(-1, Rows(0, 0, 0))


def _in_memory(
    memory: Memory, sizes: Sequence[int], layout: Sequence[int], like: torch.Tensor
) -> torch.Tensor:
    """A tensor in memory that is used again: a new allocation would cost as much as a part of the draw."""
    count = math.prod(sizes)
    kept = memory.get((like.dtype, like.device))
    if kept is None or kept.numel() < count:
        kept = memory[like.dtype, like.device] = torch.empty(count, dtype=like.dtype, device=like.device)
    view = kept[:count].view([sizes[dim] for dim in layout])
    return view.permute([layout.index(dim) for dim in range(len(layout))])


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


class Skipping:
    """Draws only this rank's values where they are adjacent, and lets the generator skip those of the other ranks.

    Skipping is cheaper than drawing. It depends on the build of torch and on the processor, so it is done only where a
    trial has given the values of the whole draw.
    """

    def __init__(self) -> None:
        self._each: dict[tuple[str, torch.dtype], int] = {}

    def drew(self, name: str, tensor: torch.Tensor, part: Part, draw: _Draw) -> bool:
        """Try to fill the tensor with this rank's part; False, with nothing drawn, where that is not possible."""
        beside = part.beside(tensor) if name in _STEADY and tensor.is_cpu else None
        if beside is None:
            return False
        key = name, tensor.dtype
        if key not in self._each:
            self._each[key] = _own_numbers(draw, tensor.dtype)
        if each := self._each[key]:
            _skip(each * beside[0])
            draw(tensor, None)
            _skip(each * beside[1])
        return bool(each)


def _skip(count: int, generator: torch.Generator | None = None) -> None:
    """Let the CPU's generator skip `count` of its own values."""
    numbers = torch.empty(min(count, _AT_ONCE), dtype=torch.uint8, device="cpu")
    for at in range(0, count, _AT_ONCE):
        numbers[: count - at].random_(generator=generator)


def _own_numbers(draw: _Draw, dtype: torch.dtype) -> int:
    """How many of the CPU generator's own values each value of this draw takes; 0 where that is not constant."""
    ahead, mine, behind = 37, 50, 41
    for each in (1, 2):
        first, second = (torch.Generator("cpu").manual_seed(0) for _ in range(2))
        whole, part = (
            torch.empty(count, dtype=dtype, device="cpu") for count in (ahead + mine + behind, mine)
        )
        draw(whole, first)
        _skip(each * ahead, second)
        draw(part, second)
        _skip(each * behind, second)
        is_same = torch.equal(whole[ahead : ahead + mine], part)
        if is_same and torch.equal(first.get_state(), second.get_state()):
            return each
    return 0
