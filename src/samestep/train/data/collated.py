"""A batch of the script's own collate_fn as the serial script has it: made of all samples, then cut into shares.

Padding to the longest sample, sorting by length and the like see the whole batch. What has no row for each sample,
such as graphs laid end to end, is made of this rank's samples alone, and its sizes say which part of the whole it is.
So is the rest of such a batch, unless it only differs by padding, as sounds do beside labels laid end to end.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any

import numpy as np
import torch

from samestep.train.nested import named_tensors
from samestep.train.step import Ragged, Rows
from samestep.train.streams import streams_kept


class Collated:
    """As a collate_fn, of samples and which of them are this rank's: its part of the batch, and what is ragged there.

    Without such a part all samples are this rank's.
    """

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, planned: tuple[list[Any], slice | None]) -> tuple[Any, dict[str, Ragged]]:
        samples, part = planned
        whole = self._collate(samples)
        if part is None:
            return whole, {}
        with streams_kept():
            rows = Rows(part.stop - part.start, part.start, len(samples))
            mine = self._collate(samples[part])
            try:
                cut = _cut(whole, mine, rows)
                return cut, dict(_across(cut, whole, rows))
            except LookupError:
                before = self._collate(samples[: part.start]) if part.start else None
                laid = {name: one for name, one in _laid(before, mine, whole) if one.rows != rows}
                try:
                    cut = _cut(whole, mine, rows, laid)
                except LookupError:
                    return mine, laid
                return cut, dict(_across(cut, whole, rows)) | laid


def _cut(whole: Any, mine: Any, rows: Rows, laid: Mapping[str, Ragged] | None = None, name: str = "") -> Any:
    """These rows of a whole batch; LookupError where a part of it has no row for each sample.

    `mine` is made of this rank's samples alone: a dimension of the samples differs between the two. With `laid`, by
    their places in the batch, tensors that are laid end to end are taken where they have the same numbers in both.
    """
    stop = rows.start + rows.mine
    if type(whole) is not type(mine):
        raise LookupError
    if isinstance(whole, torch.Tensor | np.ndarray):
        if laid is not None and isinstance(whole, torch.Tensor):
            return _cut_beside(whole, mine, rows, laid.get(name))
        return _cut_array(whole, mine, rows)
    if isinstance(whole, Mapping) or (is_dataclass(whole) and hasattr(whole, "__dict__")):
        return _cut_named(whole, mine, rows, laid, name)
    if isinstance(whole, list | tuple) and len(whole) == len(mine):
        pairs = enumerate(zip(whole, mine, strict=True))
        parts = [_cut(*pair, rows, laid, f"{name}.{at}") for at, pair in pairs]
        return type(whole)(*parts) if hasattr(whole, "_fields") else type(whole)(parts)
    if type(whole) in (list, tuple) and len(whole) == rows.all:
        return whole[rows.start : stop]
    if whole == rows.all and mine == rows.mine:
        return mine
    if isinstance(whole, int | float | str | bytes | None) and (laid is None or whole == mine):
        return whole
    raise LookupError


def _cut_named(whole: Any, mine: Any, rows: Rows, laid: Mapping[str, Ragged] | None, name: str) -> Any:
    """The same of a dict or a dataclass."""
    is_mapping = isinstance(whole, Mapping)
    parts, others = (whole, mine) if is_mapping else (vars(whole), vars(mine))
    if parts.keys() != others.keys():
        raise LookupError
    new: Any = {} if type(whole) is dict else copy.copy(whole)
    for key, value in parts.items():
        part = _cut(value, others[key], rows, laid, f"{name}.{key}")
        if is_mapping:
            new[key] = part
        else:
            object.__setattr__(new, key, part)  # a frozen dataclass allows no other way
    return new


def _cut_beside(whole: torch.Tensor, mine: torch.Tensor, rows: Rows, laid: Ragged | None) -> torch.Tensor:
    """The same beside a tensor laid end to end; numbers that count from the batch's beginning are no such rows."""
    if laid is not None:
        part = whole.narrow(laid.dim, laid.rows.start, laid.rows.mine)
    else:
        part = _cut_array(whole, mine, rows)
    if part.shape == mine.shape and not torch.equal(part, mine):
        raise LookupError
    return part.clone()


def _cut_array(whole: Any, mine: Any, rows: Rows) -> Any:
    if getattr(whole, "layout", torch.strided) != torch.strided or whole.ndim != mine.ndim:
        raise LookupError
    for dim, sizes in enumerate(zip(whole.shape, mine.shape, strict=True)):
        if sizes == (rows.all, rows.mine):
            part = whole[(slice(None),) * dim + (slice(rows.start, rows.start + rows.mine),)]
            return part.clone() if isinstance(part, torch.Tensor) else part.copy()
    if whole.ndim == 0 or (whole.shape == mine.shape and bool((whole == mine).all())):
        return whole
    raise LookupError


def _across(cut: Any, whole: Any, rows: Rows) -> Iterator[tuple[str, Ragged]]:
    """The tensors in which the samples do not lie in front, as in a batch that is padded with the time in front."""
    of_all = dict(named_tensors(whole))
    for name, tensor in named_tensors(cut):
        sizes = zip(tensor.shape, of_all[name].shape, strict=True)
        if dim := next((dim for dim, (mine, every) in enumerate(sizes) if mine != every), 0):
            yield name, Ragged(dim, rows)


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
