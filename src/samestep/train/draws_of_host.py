"""NumPy's and Python's random numbers under same=True: of a draw of the share's length this rank takes its rows.

The functions of the modules `numpy.random` and `random` are stood in for; what is not the serial script's is said once.
Not covered: generators of the script's own (`numpy.random.default_rng`), and names that were imported from the modules.
"""

import functools
import inspect
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import torch

from samestep.train.draw_parts import Part, of_permutation
from samestep.train.draw_sizes import SIZE_AT, is_written_out
from samestep.train.one_by_one import OneByOne
from samestep.train.step import Rows, Share

_SIZES_ALONE = {"rand": "random_sample", "randn": "standard_normal"}
# they take as much of the stream for each number, whatever their parameters are
_SCALED = {
    *("normal", "lognormal", "uniform", "exponential", "rayleigh", "laplace", "logistic", "gumbel"),
    *("weibull", "pareto", "power", "triangular"),
}
_OF_WHOLES = {"choice", "multinomial", "dirichlet", "multivariate_normal"}
_NO_DRAWS = {"seed", "getstate", "setstate", "Random", "SystemRandom"}


class DrawsOfHost:
    """In place of the modules' functions while it stands in."""

    def __init__(
        self,
        share: Callable[[], Share | None],
        part: Callable[[str, torch.Size], Part | None],
        one_by_one: OneByOne,
        say_other: Callable[[str, str], str],
    ) -> None:
        """`share` is the batch's where its draws are to be the whole batch's, `part` this rank's of a draw's shape."""
        self._share, self._part, self._one_by_one, self._say_other = share, part, one_by_one, say_other
        self._originals: list[tuple[ModuleType, str, Any]] = []

    def stand_in(self) -> None:
        for name in SIZE_AT.keys() | _SIZES_ALONE.keys():
            self._replace(np.random, name, self._sized)
        for module, name in ((np.random, "permutation"), (np.random, "shuffle"), (random, "shuffle")):
            self._replace(module, name, self._permuting)
        for name in set(random.__all__) - _NO_DRAWS - {"shuffle"}:
            self._replace(random, name, self._several if name in ("sample", "choices") else self._single)

    def close(self) -> None:
        for module, name, original in self._originals:
            setattr(module, name, original)
        self._originals.clear()

    def _replace(self, module: ModuleType, name: str, draw: Callable[..., Any]) -> None:
        original, named = getattr(module, name), f"{module.__name__}.{name}"

        @functools.wraps(original)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            if (share := self._share()) is None:
                return original(*args, **kwargs)
            return draw(named, original, share.rows, args, kwargs)

        self._originals.append((module, name, original))
        setattr(module, name, replaced)

    def _single(self, name: str, original: Any, rows: Rows, args: Any, kwargs: Mapping[str, Any]) -> Any:
        self._one_by_one.note(name)
        return original(*args, **kwargs)

    def _sized(self, named: str, original: Any, rows: Rows, args: Any, kwargs: Mapping[str, Any]) -> Any:
        name = named.rpartition(".")[2]
        if name in _SIZES_ALONE:
            name = _SIZES_ALONE[name]
            original, args = getattr(np.random.mtrand, name), (args or None,)
        at = "size" if len(args) <= SIZE_AT[name] else SIZE_AT[name]
        given: dict[Any, Any] = dict(enumerate(args)) | dict(kwargs)
        size = given.pop(at, None)
        by_row = {key: one for key, one in given.items() if np.ndim(one) and name not in _OF_WHOLES}
        if size is None and not by_row:
            return self._single(named, original, rows, args, kwargs)
        is_choice = name == "choice" and _length(given.get(0, given.get("a"))) == rows.mine
        if is_choice and not is_written_out(0, "a"):
            self._say_other(named, "a choice among this rank's samples is none among the whole batch")
            return original(*args, **kwargs)
        shape = (
            np.broadcast_shapes(*map(np.shape, by_row.values()))
            if size is None
            else tuple(np.atleast_1d(size).tolist())
        )
        part = self._part(named, torch.Size(shape))
        if part is None:
            return self._single(named, original, rows, args, kwargs)
        for key, one in by_row.items():
            dim = part.dim - len(shape) + np.ndim(one)
            if dim < 0 or np.shape(one)[dim] != part.rows.mine:
                continue
            if name not in _SCALED:
                self._say_other(named, "how many numbers it draws depends on the parameters of each sample")
                return original(*args, **kwargs)
            given[key] = replace(part, dim=dim).enlarged(torch.as_tensor(np.array(one)), 1.0).numpy()
        given[at] = tuple(part.rows.all if dim == part.dim else one for dim, one in enumerate(shape))
        in_places = [given.pop(key) for key in range(len(args))]
        whole = original(*in_places, **given)
        return whole.take(range(part.rows.start, part.rows.start + part.rows.mine), part.dim)

    def _several(self, named: str, original: Any, rows: Rows, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Python's choices of so many, which may be as many as this rank's samples."""
        given = inspect.signature(original).bind(*args, **kwargs)
        if len(given.arguments["population"]) == rows.mine and not is_written_out(0, "population"):
            self._say_other(named, "a choice among this rank's samples is none among the whole batch")
        elif given.arguments.get("k") == rows.mine and not is_written_out("k", 1):
            given.arguments["k"] = rows.all
            return original(*given.args, **given.kwargs)[rows.start :][: rows.mine]
        return self._single(named, original, rows, args, kwargs)

    def _permuting(self, named: str, original: Any, rows: Rows, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Of so many numbers, or of a list or array."""
        of = args[0] if args else kwargs["x"]
        if _length(of) != rows.mine or is_written_out(0, "x"):
            return self._single(named, original, rows, args, kwargs)
        self._say_other(named, "a permutation of this rank's share is none of the whole batch")
        # all ranks draw that of the whole batch, so that their streams stay alike
        whole = np.arange(rows.all)
        is_shuffled = (drawn := original(whole)) is None
        order = of_permutation(whole if is_shuffled else drawn, rows)
        moved = order if np.ndim(of) == 0 else [of[at] for at in order] if type(of) is list else of[order]
        if not is_shuffled:
            return np.asarray(moved)
        of[:] = moved
        return None


def _length(of: Any) -> int:
    return int(of) if isinstance(of, int | np.integer) else len(of)
