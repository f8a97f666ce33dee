"""Gives every rank its rows of the serial script's draws from NumPy and Python (`replicate(same=True)`).

It replaces the functions of the modules `numpy.random` and `random`, and prints a remark where a draw is not the serial
script's. Not covered: generators of the script's own (`numpy.random.default_rng`), and functions that were imported by
name (`from random import random`) before.
"""

import functools
import inspect
import random
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import CodeType, ModuleType
from typing import Any

import numpy as np
import torch

from samestep.train.batch.parts import Part, of_permutation
from samestep.train.group.group import Group
from samestep.train.passes import Rows, Share
from samestep.train.script.lines import scripts_frame
from samestep.train.script.sizes import SIZE_AT, is_over_samples, is_written_out

_SIZES_ALONE = {"rand": "random_sample", "randn": "standard_normal"}
# these take the same part of the stream for each number, whatever their parameters are
_SCALED = {
    *("normal", "lognormal", "uniform", "exponential", "rayleigh", "laplace", "logistic", "gumbel"),
    *("weibull", "pareto", "power", "triangular"),
}
_OF_WHOLES = {"choice", "multinomial", "dirichlet", "multivariate_normal"}
_NO_DRAWS = {"seed", "getstate", "setstate", "Random", "SystemRandom"}


class OneByOne:
    """Finds loops that draw one number for each sample: on a rank these are not the serial script's numbers."""

    def __init__(
        self,
        share: Callable[[], Share | None],
        may_be_samples: Callable[[Any], bool],
        say_other: Callable[[str, str], str],
    ) -> None:
        self._share, self._may_be_samples, self._say_other = share, may_be_samples, say_other
        self._counted_in: Share | None = None
        # by the script's call and its caller; _others: those that do not draw for samples, as for each time step
        self._others = set[tuple[CodeType | int, ...]]()
        self._counts = Counter[tuple[CodeType | int, ...]]()

    def note(self, name: str) -> None:
        """Count a draw; print a remark where its line is in a loop over the samples and draws as often."""
        share, frame = self._share(), scripts_frame(sys._getframe(1))
        if share is None or frame is None:
            return
        if share is not self._counted_in:
            mine = self._counted_in.mine if self._counted_in is not None else 0
            self._others |= {at for at, count in self._counts.items() if count != mine}
            self._counted_in = share
            self._counts.clear()
        caller = scripts_frame(frame.f_back) or frame
        self._counts[at := (frame.f_code, frame.f_lasti, caller.f_code, caller.f_lasti)] += 1
        if self._counts[at] != share.mine or at in self._others:
            return
        if is_over_samples(frame, share.mine, self._may_be_samples):
            why = "it draws one by one for this rank's samples; draw for all at once, as in rand(len(x)) or model(x)"
            self._say_other(name, why)
        else:
            self._others.add(at)


class DrawsOfHost:
    """Replaces the modules' functions from `stand_in` on."""

    def __init__(
        self,
        share: Callable[[], Share | None],
        part: Callable[[str, torch.Size], Part | None],
        one_by_one: OneByOne,
        say_other: Callable[[str, str], str],
    ) -> None:
        """share: the batch at hand where it is shared, else None. part: this rank's part of a draw of this shape."""
        self._share, self._part, self._one_by_one, self._say_other = share, part, one_by_one, say_other

    def stand_in(self, group: Group) -> None:
        for name in SIZE_AT.keys() | _SIZES_ALONE.keys():
            self._replace(group, np.random, name, self._sized)
        for module, name in ((np.random, "permutation"), (np.random, "shuffle"), (random, "shuffle")):
            self._replace(group, module, name, self._permuting)
        for name in set(random.__all__) - _NO_DRAWS - {"shuffle"}:
            draw = self._several if name in ("sample", "choices") else self._single
            self._replace(group, random, name, draw)

    def _replace(self, group: Group, module: ModuleType, name: str, draw: Callable[..., Any]) -> None:
        original, named = getattr(module, name), f"{module.__name__}.{name}"

        @functools.wraps(original)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            if (share := self._share()) is None:
                return original(*args, **kwargs)
            return draw(named, original, share.rows, args, kwargs)

        group.replace(module, name, replaced)

    def _single(self, name: str, original: Any, rows: Rows, args: Any, kwargs: Mapping[str, Any]) -> Any:
        self._one_by_one.note(name)
        return original(*args, **kwargs)

    def _sized(self, named: str, original: Any, rows: Rows, args: Any, kwargs: Mapping[str, Any]) -> Any:
        name = named.rpartition(".")[2]
        if name in _SIZES_ALONE:
            name = _SIZES_ALONE[name]
            original, args = getattr(np.random.mtrand, name), (args or None,)
        size_key = "size" if len(args) <= SIZE_AT[name] else SIZE_AT[name]
        arguments: dict[Any, Any] = dict(enumerate(args)) | dict(kwargs)
        size = arguments.pop(size_key, None)
        arrays = {key: value for key, value in arguments.items() if np.ndim(value)}
        by_row = {} if name in _OF_WHOLES else arrays
        if size is None and not by_row:
            return self._single(named, original, rows, args, kwargs)
        is_choice = name == "choice" and _length(arguments.get(0, arguments.get("a"))) == rows.mine
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
        for key, parameter in by_row.items():
            dim = part.dim - len(shape) + np.ndim(parameter)
            if dim < 0 or np.shape(parameter)[dim] != part.rows.mine:
                continue
            if name not in _SCALED:
                self._say_other(named, "how many numbers it draws depends on the parameters of each sample")
                return original(*args, **kwargs)
            tensor = torch.as_tensor(np.array(parameter))
            arguments[key] = replace(part, dim=dim).enlarged(tensor, 1.0).numpy()
        arguments[size_key] = (*shape[: part.dim], part.rows.all, *shape[part.dim + 1 :])
        by_position = [arguments.pop(key) for key in range(len(args))]
        whole = original(*by_position, **arguments)
        return whole.take(range(part.rows.start, part.rows.start + part.rows.mine), part.dim)

    def _several(self, named: str, original: Any, rows: Rows, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Python's sample and choices; their population, or their number k, may be this rank's samples."""
        bound = inspect.signature(original).bind(*args, **kwargs)
        if len(bound.arguments["population"]) == rows.mine and not is_written_out(0, "population"):
            self._say_other(named, "a choice among this rank's samples is none among the whole batch")
        elif bound.arguments.get("k") == rows.mine and not is_written_out("k", 1):
            bound.arguments["k"] = rows.all
            return original(*bound.args, **bound.kwargs)[rows.start :][: rows.mine]
        return self._single(named, original, rows, args, kwargs)

    def _permuting(self, named: str, original: Any, rows: Rows, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """shuffle and permutation, of a number, a list or an array."""
        values = args[0] if args else kwargs["x"]
        if _length(values) != rows.mine or is_written_out(0, "x"):
            return self._single(named, original, rows, args, kwargs)
        self._say_other(named, "a permutation of this rank's share is none of the whole batch")
        # all ranks draw the whole batch's permutation, so that their streams stay equal
        whole = np.arange(rows.all)
        is_shuffled = (drawn := original(whole)) is None
        order = of_permutation(whole if is_shuffled else drawn, rows)
        permuted = order
        if np.ndim(values):
            permuted = [values[at] for at in order] if type(values) is list else values[order]
        if not is_shuffled:
            return np.asarray(permuted)
        values[:] = permuted
        return None


def _length(value: Any) -> int:
    return int(value) if isinstance(value, int | np.integer) else len(value)
