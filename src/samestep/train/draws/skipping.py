"""Draws only this rank's part of a whole batch's random numbers, where the generator can skip the rest."""

from collections.abc import Callable

import torch

from samestep.train.batch.parts import Part

_Draw = Callable[[torch.Tensor, torch.Generator | None], object]
# these take the same count of the generator's values for every value that they draw
_STEADY = ("bernoulli_.float", "uniform_", "exponential_")
_AT_ONCE = 1 << 15


class Skipping:
    """Draws this rank's values where they are adjacent, and lets the generator skip those of the other ranks.

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
    """Let the CPU's generator skip `count` of its own values; an integer of 64 bits takes two of them."""
    pairs, single = divmod(count, 2)
    numbers = torch.empty(min(pairs, _AT_ONCE), dtype=torch.int64, device="cpu")
    for at in range(0, pairs, _AT_ONCE):
        numbers[: pairs - at].random_(generator=generator)
    torch.empty(single, dtype=torch.int32, device="cpu").random_(generator=generator)


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
