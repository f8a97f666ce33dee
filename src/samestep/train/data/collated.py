"""Collates the whole batch with the script's collate_fn, as the serial script does, and cuts it into shares.

So padding to the longest sample or sorting by length sees the whole batch. Example: 4 texts are padded to (4, 9). This
rank has the texts 2 and 3 and gets rows 2 and 3 of (4, 9), though alone they would be padded to (2, 7).
A tensor without a row for each sample, such as the nodes of several graphs in (nodes, features), is collated of this
rank's samples alone; its sizes tell which rows of the whole batch it has. Then the other tensors are collated so too,
unless they differ from the whole batch's rows only by padding.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch

from samestep.train.nested import named_tensors
from samestep.train.passes import Ragged, Rows
from samestep.train.streams import streams_kept

_DEEPEST = 4  # of objects in a batch, which may refer to each other


class _Cut(NamedTuple):
    """What is known where a batch is cut: this rank's rows, and the whole batch."""

    rows: Rows
    whole: Any
    # the concatenated tensors by their places; their rows are taken if they have the same values in both batches
    ragged: Mapping[str, Ragged] | None = None


class Collated:
    """A collate_fn of samples and this rank's part of them; returns its part of the batch, and the ragged tensors."""

    # With None as the part, all samples are this rank's.

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
                cut = _cut(whole, mine, _Cut(rows, whole))
                return cut, dict(_across(cut, whole, rows))
            except LookupError:
                before = self._collate(samples[: part.start]) if part.start else None
                ragged = {
                    name: laid for name, laid in _concatenated(before, mine, whole) if laid.rows != rows
                }
                try:
                    cut = _cut(whole, mine, _Cut(rows, whole, ragged))
                except LookupError:
                    return mine, ragged
                return cut, dict(_across(cut, whole, rows)) | ragged


def _cut(whole: Any, mine: Any, batch: _Cut, name: str = "") -> Any:
    """This rank's part of the whole batch; LookupError where a part of the batch has no row for each sample."""
    # `mine` is collated of this rank's samples alone: the dimension of the samples has another size there
    rows, ragged = batch.rows, batch.ragged
    if type(whole) is not type(mine):
        raise LookupError
    if isinstance(whole, torch.Tensor | np.ndarray) and whole.ndim:
        if ragged is not None and isinstance(whole, torch.Tensor):
            return _cut_beside(whole, mine, rows, ragged.get(name))
        return _cut_array(whole, mine, rows)
    if isinstance(whole, list | tuple) and len(whole) == len(mine):
        pairs = enumerate(zip(whole, mine, strict=True))
        parts = [_cut(*pair, batch, f"{name}.{index}") for index, pair in pairs]
        return type(whole)(*parts) if hasattr(whole, "_fields") else type(whole)(parts)
    if type(whole) in (list, tuple) and len(whole) == rows.all:
        return whole[rows.start : rows.start + rows.mine]
    if isinstance(whole, int | float | str | bytes | None | torch.Tensor | np.ndarray | np.generic):
        return _number(whole, mine, batch)
    is_plain = bool(getattr(whole, "__dict__", None)) and name.count(".") < _DEEPEST
    if isinstance(whole, Mapping) or (
        is_plain and not isinstance(whole, type | FunctionType | torch.nn.Module)
    ):
        return _cut_named(whole, mine, batch, name)
    raise LookupError


def _number(whole: Any, mine: Any, batch: _Cut) -> Any:
    """A count of this rank's samples or tokens, or else what the whole batch has, as its padded length."""
    if whole == mine or (whole, mine) == (batch.rows.all, batch.rows.mine):
        return mine
    if batch.ragged is not None:
        raise LookupError
    is_integer = isinstance(whole, int) and not isinstance(whole, bool)
    if not (is_integer or "int" in str(getattr(whole, "dtype", ""))):
        return whole
    sizes = {size for _, tensor in named_tensors(batch.whole) for size in tensor.shape}
    return mine if sizes.isdisjoint(int(whole) + step for step in (-1, 0, 1)) else whole


def _cut_named(whole: Any, mine: Any, batch: _Cut, name: str) -> Any:
    """`_cut` for a dict or a plain object."""
    is_mapping = isinstance(whole, Mapping)
    parts, others = (whole, mine) if is_mapping else (vars(whole), vars(mine))
    if parts.keys() != others.keys():
        raise LookupError
    try:
        copied: Any = {} if type(whole) is dict else copy.copy(whole)
    except Exception as error:  # as an object refuses that holds a file or a lock
        raise LookupError from error
    for key, value in parts.items():
        part = _cut(value, others[key], batch, f"{name}.{key}")
        if is_mapping:
            copied[key] = part
        else:
            object.__setattr__(copied, key, part)  # a frozen dataclass allows no other way
    return copied


def _cut_beside(whole: torch.Tensor, mine: torch.Tensor, rows: Rows, ragged: Ragged | None) -> torch.Tensor:
    """`_cut` for a tensor of a batch with concatenated tensors; LookupError for offsets into the whole batch."""
    if ragged is not None:
        part = whole.narrow(ragged.dim, ragged.rows.start, ragged.rows.mine)
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
    if whole.shape == mine.shape and bool((whole == mine).all()):
        return whole
    raise LookupError


def _across(cut: Any, whole: Any, rows: Rows) -> Iterator[tuple[str, Ragged]]:
    """The tensors whose samples are not in the first dimension, as in a batch that is padded with time first."""
    of_all = dict(named_tensors(whole))
    for name, tensor in named_tensors(cut):
        sizes = zip(tensor.shape, of_all[name].shape, strict=True)
        if dim := next((dim for dim, (mine, all_) in enumerate(sizes) if mine != all_), 0):
            yield name, Ragged(dim, rows)


def _concatenated(before: Any, mine: Any, whole: Any) -> Iterator[tuple[str, Ragged]]:
    """Each tensor that is concatenated in the whole batch, by its place, with this rank's rows of it."""
    # `before` is collated of the samples before this rank's; None if there are none.
    ahead, all_of_it = dict(named_tensors(before)), dict(named_tensors(whole))
    for name, tensor in named_tensors(mine):
        of_all, of_ahead = all_of_it.get(name), ahead.get(name)
        if of_all is None or of_all.dim() != tensor.dim() or (of_ahead is None and before is not None):
            continue
        differing = [dim for dim in range(tensor.dim()) if tensor.shape[dim] != of_all.shape[dim]]
        if len(differing) == 1:
            (dim,) = differing
            rows = Rows(tensor.shape[dim], 0 if of_ahead is None else of_ahead.shape[dim], of_all.shape[dim])
            if rows.start + rows.mine <= rows.all:
                yield name, Ragged(dim, rows)
