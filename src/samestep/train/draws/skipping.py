"""Draws only this rank's part of a whole batch's random numbers, where the generator can skip the rest."""

import ctypes
from collections.abc import Callable
from itertools import repeat

import numpy as np
import torch

from samestep.train.batch.parts import Part

_Draw = Callable[[torch.Tensor, torch.Generator | None], object]
# these take the same count of the generator's words for every value that they draw
_STEADY = ("bernoulli_.float", "uniform_", "exponential_")
_WORTH_IT = 1500  # values that take longer to draw than a piece takes to begin
_WORDS = 624  # that Mersenne Twister makes at once
_STATE = 5056  # bytes of torch's generator: seed, how many words are left, whether it has any, how many are used, words


class Skipping:
    """Draws this rank's values, piece by piece as they are adjacent, and skips those of the other ranks."""

    # Skipping is cheaper than drawing. It depends on the build of torch and on the processor, so it is done only where
    # a trial has given the values of the whole draw.

    def __init__(self) -> None:
        self._each: dict[tuple[str, torch.dtype], int] = {}
        self._twister = _Twister()

    def drew(self, name: str, tensor: torch.Tensor, part: Part, draw: _Draw) -> bool:
        """Try to fill the tensor with this rank's part; False, with nothing drawn, where that is not possible."""
        pieces = part.pieces(tensor) if name in _STEADY and tensor.is_cpu else None
        if pieces is None:
            return False
        mine, before, after = pieces
        if len(mine) > 1 and before + after < _WORTH_IT:
            return False
        key = name, tensor.dtype
        if key not in self._each:
            self._each[key] = self._words_of_each(draw, tensor.dtype)
        if each := self._each[key]:
            skipped = before
            for piece in mine:
                self._twister.skip(torch.default_generator, each * skipped)
                draw(piece, None)
                skipped = after + before
            self._twister.skip(torch.default_generator, each * after)
        return bool(each)

    def _words_of_each(self, draw: _Draw, dtype: torch.dtype) -> int:
        """How many words of the CPU's generator each value of this draw takes; 0 where that is not constant."""
        ahead, mine, behind = 370, 500, 1410
        for each in (1, 2):
            first, second = (torch.Generator("cpu").manual_seed(0) for _ in range(2))
            if first.get_state().numel() != _STATE:
                return 0
            whole, part = (
                torch.empty(count, dtype=dtype, device="cpu") for count in (ahead + mine + behind, mine)
            )
            draw(whole, first)
            self._twister.skip(second, each * ahead)
            draw(part, second)
            self._twister.skip(second, each * behind)
            is_same = torch.equal(whole[ahead : ahead + mine], part)
            if is_same and torch.equal(first.get_state(), second.get_state()):
                return each
        return 0


class _Twister:
    """NumPy's Mersenne Twister, which makes the next 624 words in a tenth of the time that torch takes to draw them."""

    # Torch's generator makes the same words, but has no function that passes over them.

    def __init__(self) -> None:
        self._generator = np.random.MT19937(0)  # owns the memory that is read and written here
        interface = self._generator.ctypes
        self._at = ctypes.c_void_p(interface.state_address)
        self._words = np.ctypeslib.as_array((ctypes.c_uint32 * _WORDS).from_address(interface.state_address))
        self._used = ctypes.c_int.from_address(interface.state_address + self._words.nbytes)
        self._next = ctypes.cast(interface.next_uint32, ctypes.PYFUNCTYPE(None, ctypes.c_void_p))
        self._state = torch.empty(_STATE, dtype=torch.uint8, device="cpu")
        fields = self._state.numpy()
        self._left, self._used_of_torch = fields[8:12].view(np.int32), fields[16:24].view(np.uint64)
        self._words_of_torch = fields[24 : 24 + 8 * _WORDS].view(np.uint64)

    def skip(self, generator: torch.Generator, count: int) -> None:
        """Let torch's CPU generator pass over its next `count` words."""
        if not count:
            return
        state = generator.get_state()
        ctypes.memmove(self._state.data_ptr(), state.data_ptr(), _STATE)
        # the last word passed over; torch makes new words when it takes the first of them
        last = _WORDS - int(self._left[0]) + count
        self._words[:] = self._words_of_torch
        for _ in repeat(None, last // _WORDS):
            self._used.value = _WORDS
            self._next(self._at)
        self._words_of_torch[:] = self._words
        self._used_of_torch[0] = last % _WORDS + 1
        self._left[0] = _WORDS - last % _WORDS
        generator.set_state(self._state)
