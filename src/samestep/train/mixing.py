"""What makes a number of one sample from others of its batch, so that on a share it is not the serial script's.

The average of ranks' losses is the whole batch's where each is an average over samples. So averages over this rank's
samples may be added and weighed, and not multiplied with each other, compared or put under a root.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from samestep.train.batch_sizes import Other, stands_for_samples
from samestep.train.group.control import users_line

_MOVES = "moves samples within a batch"
_COMPARES = "compares the samples of a batch"
_MOVING = {"flip", "roll"}
_COMPARING = {"sort", "topk", "kthvalue", "median", "cumsum", "_softmax", "_log_softmax"}
# of averages over samples these are such, and of two of them products are none
_LINEAR = {
    *("add", "sub", "rsub", "neg", "sum", "mean", "clone", "detach", "alias", "nan_to_num", "_to_copy"),
    *("view", "_unsafe_view", "_reshape_alias", "expand", "repeat", "squeeze", "unsqueeze", "stack", "cat"),
    *("select", "slice", "split", "unbind", "index", "index_select", "gather", "diagonal"),
    *("t", "permute", "transpose"),
}
_PICKS = {"select", "slice", "split", "split_with_sizes", "unbind", "index", "index_select", "gather"}
_PRODUCTS = {"mul", "mm", "bmm", "dot", "mv", "addmm"}


def averaged(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], given: Sequence[Other], made: Any, other: Any
) -> str | None:
    """How what it made depends on averages over this rank's samples: None not at all, "" so that the average over ranks
    is the whole batch's, else what it does to the samples, and where.
    """
    name, made, other = func._opname, _first(made), _first(other)
    if not isinstance(made, torch.Tensor) or not made.is_floating_point():
        return None
    # what only has the sizes of another has none of its numbers, and slopes are another rule's affair
    if name.endswith("_like") or name.startswith("new_") or torch._C._current_autograd_node() is not None:
        return None
    known = [one.averaged for one in given if one.averaged is not None]
    if any(known):
        return next(filter(None, known))
    if does := _mixes(func, args, kwargs, given, other):
        return f"{does} ({users_line()})"
    is_batch = [one.other is not None and one.other.shape != one.tensor.shape for one in given]
    is_sure = any(is_batch) and all(one.sure for one in given)
    is_reduced = is_sure and isinstance(other, torch.Tensor) and other.shape == made.shape
    if not known and (not is_reduced or name in _PICKS):
        return None
    is_loss = "_loss" in name or "cross_entropy" in name
    is_average = name in _LINEAR or (is_reduced and not known and (is_loss or name in _PRODUCTS))
    if known and name in _PRODUCTS:
        others = [has_it for one, has_it in zip(given, is_batch, strict=True) if one.averaged is None]
        is_average = len(known) == 1 and not any(others)
    elif known and name == "div":
        # whether ranks divide by numbers of terms that fit, is compared in backward
        has_slope = [one.averaged is not None and one.tensor.requires_grad for one in given]
        is_average = given[0].averaged is not None and not any(is_batch[1:] + has_slope[1:])
    return "" if is_average else f"computes with averages over the samples of a batch ({users_line()})"


def _mixes(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], given: Sequence[Other], other: Any
) -> str:
    """What it does to the samples along their dimension, which it may make twice."""
    is_along, of = func._opname in _MOVING | _COMPARING, given[0].other if given else None
    dims = _dims(func, args, kwargs, of.dim()) if is_along and of is not None else set()
    if of is not None and any(stands_for_samples(of.shape[dim]) for dim in dims):
        return _MOVES if func._opname in _MOVING else _COMPARES
    batches = [
        one for one in given if one.sure and one.other is not None and one.other.shape != one.tensor.shape
    ]
    if len({one.order for one in batches}) > 1 and func._opname not in _PICKS:
        return _MOVES
    are_twice = isinstance(other, torch.Tensor) and sum(map(stands_for_samples, other.shape)) > 1
    return "makes pairs of the samples of a batch" if are_twice else ""


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list | tuple) and value else value


def _dims(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], count: int) -> set[int]:
    """The dimensions that it goes along: those that are given, or all."""
    for at, argument in enumerate(func._schema.arguments):
        if argument.name in ("dim", "dims"):
            given = args[at] if at < len(args) else kwargs.get(argument.name, argument.default_value)
            dims = [given] if isinstance(given, int) else given
            return {dim % count for dim in dims} if dims else {*range(count)}
    return {*range(count)}
