"""Notes what a script draws from the global generators of torch, NumPy and Python, and can undo the draws of lines."""

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from samestep.train.data import loader
from samestep.train.group.control import users_line
from samestep.verify.record import wrap

_MOST_DRAWS = 1000
_OF_LOADERS = (str(Path(torch.utils.data.__file__).parent), str(Path(loader.__file__).parent))
_PLACES = (
    (
        torch,
        "rand randn randint randperm normal multinomial bernoulli poisson rand_like randn_like randint_like",
    ),
    (torch.Tensor, "uniform_ normal_ random_ bernoulli_ exponential_ log_normal_ multinomial"),
    (np.random, "rand randn random randint uniform normal choice permutation shuffle"),
    (random, "random uniform randint randrange choice choices sample shuffle gauss"),
)


class Drawn:
    """The draws in their order, each with its line, its function, and how many numbers it draws."""

    def __init__(self, undone: Sequence[str], *, is_noted: bool) -> None:
        self._is_noted = is_noted
        self._undone = {line for lines in undone for line in lines.split(",")}
        self.draws: list[tuple[str, str, int]] = []

    def begin(self) -> None:
        for owner, names in _PLACES if self._is_noted else ():
            for name in names.split():
                wrap(owner, name, partial(self._draw, f"{owner.__name__.replace('numpy', 'np')}.{name}"))

    def _draw(self, name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or kwargs.get("generator") is not None or _is_of_a_loader():
            return original(*args, **kwargs)
        if (line := users_line()) in self._undone:
            with _undone():
                return original(*args, **kwargs)
        drawn = original(*args, **kwargs)
        if len(self.draws) < _MOST_DRAWS:
            count = drawn.numel() if isinstance(drawn, torch.Tensor) else np.size(drawn)
            self.draws.append((line, name, count))
        return drawn


def _is_of_a_loader() -> bool:
    """Whether a loader draws an order, or reads a sample: these are not at the same time in both scripts."""
    frame = sys._getframe(2)
    while frame.f_back is not None and not frame.f_code.co_filename.startswith(_OF_LOADERS):
        frame = frame.f_back
    return frame.f_back is not None


@contextmanager
def _undone() -> Iterator[None]:
    of_numpy, of_python = np.random.get_state(), random.getstate()
    with torch.random.fork_rng():
        yield
    np.random.set_state(of_numpy)
    random.setstate(of_python)
