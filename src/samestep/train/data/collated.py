"""A batch of the script's own collate_fn as the serial script has it: made of all samples, then cut into shares.

Padding to the longest sample, sorting by length and the like see the whole batch. What has no row for each sample,
such as graphs laid end to end, is made of this rank's samples alone, and its sizes say which part of the whole it is.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from samestep.train.nested import named_tensors
from samestep.train.step import Ragged, Rows
from samestep.train.streams import streams_kept

Collate = Callable[[list[Any]], Any]


class Whole(list[Any]):
    """A whole batch, of which a part is this rank's."""

    def __init__(self, values: Iterable[Any], part: slice) -> None:
        super().__init__(values)
        self.part = part

    def __reduce__(self) -> Any:
        return Whole, (list(self), self.part)


class Collated:
    """As a collate_fn: of a whole batch this rank's part and its sizes, of a share what the script's own makes."""

    def __init__(self, collate: Collate) -> None:
        self._collate = collate

    def __call__(self, samples: list[Any]) -> Any:
        if not isinstance(samples, Whole):
            return self._collate(samples)
        part = samples.part
        whole = self._collate(list(samples))
        with streams_kept():
            mine = self._collate(samples[part])
            try:
                return _Cut(part.start, part.stop, len(samples)).rows(whole, mine), {}
            except LookupError:
                before = self._collate(samples[: part.start]) if part.start else None
                samples_of = Rows(part.stop - part.start, part.start, len(samples))
                return mine, {name: one for name, one in _laid(before, mine, whole) if one.rows != samples_of}


@dataclass(frozen=True)
class _Cut:
    start: int
    stop: int
    all: int

    def rows(self, whole: Any, mine: Any) -> Any:
        """This rank's rows of a whole batch; LookupError where a part of it has no row for each sample.

        `mine` is made of this rank's samples alone: a dimension of the samples differs between the two.
        """
        if type(whole) is not type(mine):
            raise LookupError
        if isinstance(whole, torch.Tensor):
            return self._rows_of_tensor(whole, mine)
        if isinstance(whole, np.ndarray):
            return self._rows_of_tensor(torch.from_numpy(whole), torch.from_numpy(mine)).numpy()
        if isinstance(whole, Mapping) and whole.keys() == mine.keys():
            new: Any = {} if type(whole) is dict else copy.copy(whole)
            for key, value in whole.items():
                new[key] = self.rows(value, mine[key])
            return new
        if isinstance(whole, list | tuple):
            return self._rows_of_sequence(whole, mine)
        if whole == self.all and mine == self.stop - self.start:
            return mine
        if isinstance(whole, int | float | str | bytes | None):
            return whole
        raise LookupError

    def _rows_of_tensor(self, whole: torch.Tensor, mine: torch.Tensor) -> torch.Tensor:
        if whole.layout != torch.strided or whole.dim() != mine.dim():
            raise LookupError
        wanted = self.all, self.stop - self.start
        found = [
            dim for dim, sizes in enumerate(zip(whole.shape, mine.shape, strict=True)) if sizes == wanted
        ]
        if found:
            return whole.narrow(found[0], self.start, wanted[1]).clone()
        if whole.dim() == 0 or torch.equal(whole, mine):
            return whole
        raise LookupError

    def _rows_of_sequence(self, whole: Any, mine: Any) -> Any:
        if len(whole) != len(mine):
            if len(whole) != self.all or type(whole) not in (list, tuple):
                raise LookupError
            return whole[self.start : self.stop]
        parts = [self.rows(*pair) for pair in zip(whole, mine, strict=True)]
        return type(whole)(*parts) if hasattr(whole, "_fields") else type(whole)(parts)


def _laid(before: Any, mine: Any, whole: Any) -> Iterator[tuple[str, Ragged]]:
    """Of each tensor that is laid end to end in the whole batch, by its place in the batch, where this rank's part is.

    `before` is made of the samples ahead of this rank's, None where there are none.
    """
    ahead, all_of_it = dict(named_tensors(before)), dict(named_tensors(whole))
    for name, tensor in named_tensors(mine):
        of_all, of_ahead = all_of_it.get(name), ahead.get(name)
        if of_all is None or of_all.dim() != tensor.dim() or (of_ahead is None and before is not None):
            continue
        unlike = [dim for dim in range(tensor.dim()) if tensor.shape[dim] != of_all.shape[dim]]
        if len(unlike) == 1:
            (dim,) = unlike
            rows = Rows(tensor.shape[dim], 0 if of_ahead is None else of_ahead.shape[dim], of_all.shape[dim])
            if rows.start + rows.mine <= rows.all:
                yield name, Ragged(dim, rows)
