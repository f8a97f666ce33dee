"""Which part of a whole batch's random draw is this rank's."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from samestep.train.batch_sizes import Place
from samestep.train.step import Rows, Share
from samestep.train.views import layout_of

# what is drawn, its dimensions, and the calls from the script's line down to it
Line = tuple[str, int, tuple[Any, ...]]
Memory = dict[tuple[torch.dtype, torch.device], torch.Tensor]
_Draw = Callable[[torch.Tensor, torch.Generator | None], object]
# those that take as many of the generator's numbers for each of theirs, whatever they are given
_STEADY = ("bernoulli_.float", "uniform_", "exponential_")
_AT_ONCE = 1 << 18


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

    def beside(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """How many numbers of the whole draw are ahead of this rank's and behind them; None if among them too."""
        is_one_piece = self.dim == 0 and tensor.shape[0] == self.rows.mine * self.after
        is_plain = tensor.is_contiguous() and list(self.layout) == sorted(self.layout)
        if self.chosen is not None or not (is_one_piece and is_plain):
            return None
        row = tensor.numel() // self.rows.mine
        return self.rows.start * row, (self.rows.all - self.rows.start - self.rows.mine) * row


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


class Skipping:
    """Draws this rank's numbers alone where they are in one piece; the generator goes on by those of the others.

    That is cheaper than to draw them. It is done where it was tried that the numbers are those of the whole draw,
    since this is another with each build of torch and with each processor.
    """

    def __init__(self) -> None:
        self._each: dict[tuple[str, torch.dtype], int] = {}

    def drew(self, name: str, tensor: torch.Tensor, part: Part, draw: _Draw) -> bool:
        """Whether the tensor holds this rank's part of the draw now; if not, nothing was drawn."""
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
    """Let the CPU's generator go on by so many of its own numbers."""
    numbers = torch.empty(min(count, _AT_ONCE), dtype=torch.uint8, device="cpu")
    for at in range(0, count, _AT_ONCE):
        numbers[: count - at].random_(generator=generator)


def _own_numbers(draw: _Draw, dtype: torch.dtype) -> int:
    """How many of the CPU's generator's own numbers each number of this draw takes; 0 where that differs."""
    ahead, mine, behind = 37, 50, 41
    for each in (1, 2):
        one, other = (torch.Generator("cpu").manual_seed(0) for _ in range(2))
        whole, part = (
            torch.empty(count, dtype=dtype, device="cpu") for count in (ahead + mine + behind, mine)
        )
        draw(whole, one)
        _skip(each * ahead, other)
        draw(part, other)
        _skip(each * behind, other)
        if torch.equal(whole[ahead : ahead + mine], part) and torch.equal(one.get_state(), other.get_state()):
            return each
    return 0
