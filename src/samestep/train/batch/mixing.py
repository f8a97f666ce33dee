"""Finds losses that mix the samples of a batch: on a share of the batch they are not the serial script's.

Ranks average their gradients. That is exact where a loss is an average over samples, and it stays exact where such
averages are added or multiplied by constants. Examples: with e = error(x) on this rank's samples, `e.mean() + 0.1 *
h.mean()` is exact. `e.mean().sqrt()`, `e.mean() * h.mean()` and `e.softmax(0)` are not: they need all samples at once.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from samestep.train.batch.sizes import Order, Traced, stands_for_samples
from samestep.train.group.control import users_line
from samestep.train.loss import Averaged
from samestep.train.passes import Rows
from samestep.train.script.sizes import number_in_line

_MOVES = "moves samples within a batch"
_COMPARES = "compares the samples of a batch"
_ADDING = {"add", "sub"}
_MOVING = {"flip", "roll"}
_COMPARING = {"sort", "topk", "kthvalue", "median", "cumsum", "_softmax", "_log_softmax"}
_PICKS = {
    *("select", "slice", "split", "split_with_sizes", "unbind", "index", "index_select", "gather"),
    "_pack_padded_sequence",  # its lengths were sorted together with the samples
}
IN_PLACE = {"add_", "sub_", "mul_", "div_"}
# these make averages over samples of averages over samples; a product does so with a single average among its factors
_LINEAR = {
    *("add", "sub", "rsub", "neg", "sum", "mean", "clone", "detach", "alias", "nan_to_num", "_to_copy"),
    *("view", "_unsafe_view", "_reshape_alias", "expand", "repeat", "squeeze", "unsqueeze", "stack", "cat"),
    *("t", "permute", "transpose", "diagonal", *_PICKS),
}
_PRODUCTS = {"mul", "mm", "bmm", "dot", "mv", "addmm"}
_COUNTS = {"sum", "bincount"}
# for a divisor: a count that may be 0
_BOUNDS = {"clamp", "clamp_min", "maximum"}


def averaged(
    call: tuple[Any, Sequence[Any], dict[str, Any]],
    operands: Sequence[Traced],
    result: Any,
    probe: Any,
    order: Order,
    rows: Rows,
) -> Averaged | None:
    """How an operation's result depends on averages over this rank's samples, None where it does not."""
    func, args, kwargs = call
    name, result, probe = func._opname.removesuffix("_"), _first(result), _first(probe)
    # zeros_like uses no values of its operand; gradients are checked in backward.py
    if _uses_only_sizes(name) or torch._C._current_autograd_node() is not None:
        return None
    averages = [operand.averaged for operand in operands if operand.averaged is not None]
    have_batch = [operand.has_batch for operand in operands]
    if not isinstance(result, torch.Tensor):
        return None
    # also a mask or an index that is made of it
    if mixed := next((average for average in averages if average.does), None):
        return mixed
    # an integer is no term of a loss, but it may be the count that divides it
    is_count = name in _COUNTS or (averages and (any(have_batch) or name in {"mul", *_LINEAR, *_BOUNDS}))
    if not (result.is_floating_point() or is_count):
        return None
    arguments = arguments_of(func, args, kwargs)
    if does := _mixes(name, arguments, operands, probe, order, rows.mine):
        return Averaged(f"{does} ({users_line()})")
    of_model = any(operand.tensor.requires_grad for operand in operands)
    # where a size is not followed, as in the gradient of an attack, a dimension may be the batch's
    is_sure = any(have_batch) and all(operand.sure and operand.probe is not None for operand in operands)
    is_reduced = is_sure and isinstance(probe, torch.Tensor) and probe.shape == result.shape
    if not averages and (not is_reduced or name in _PICKS):
        # samples that a loop of the script has added, each of them once
        is_sum = name in _ADDING and not any(have_batch) and 1 < rows.mine == len(order or ())
        return Averaged("", of_model, sums=True) if is_sum else None
    of_model |= any(average.of_model for average in averages)
    sums, means = any(average.sums for average in averages), any(average.means for average in averages)
    if not averages:
        sums = arguments.get("reduction", 1 + (name in {*_COUNTS, *_PRODUCTS})) == 2
        means = not sums
    if not _is_average(name, operands, have_batch, of_model=of_model):
        # a sum that depends on no output, as of a mask, may be divided by this rank's own count
        sums &= of_model
        does = f"computes with {'sums' if sums else 'averages'} over the samples of a batch"
    elif averages and name in ("mul", "div"):
        does, sums, means = _weighed(name, args[1], sums, means, rows)
    return Averaged(f"{does} ({users_line()})" if does else "", of_model, sums, means)


def _is_average(name: str, operands: Sequence[Traced], have_batch: Sequence[bool], *, of_model: bool) -> bool:
    """Whether an operation only adds averages and sums over samples, or multiplies them by constants."""
    averages = [operand.averaged for operand in operands if operand.averaged is not None]
    if not averages:
        return "_loss" in name or "cross_entropy" in name or name in _LINEAR | _PRODUCTS | _COUNTS
    if name in _PRODUCTS:
        factors_have_batch = [operand.has_batch for operand in operands if operand.averaged is None]
        return len(averages) == 1 and not any(factors_have_batch)
    if name == "div":
        numerator, *denominators = averages
        if operands[0].probe is None:  # a number of terms that a mask chose, divided by their count
            return not numerator.of_model
        # a sum divided by a sum of labels or masks: backward compares these counts between ranks
        are_counts = all(numerator.sums and count.sums and not count.of_model for count in denominators)
        return operands[0].averaged is numerator and not any(have_batch[1:]) and are_counts
    return name in _LINEAR or (name in _BOUNDS and not of_model)


def _weighed(name: str, factor: Any, sums: bool, means: bool, rows: Rows) -> tuple[str, bool, bool]:
    """After a product or quotient with a number: `does`, `sums` and `means` of Averaged."""
    is_written_out, power = number_in_line(rows.mine)
    number = factor if isinstance(factor, int | float) else 0.0
    if is_written_out:
        return "", sums, means
    if number and power:
        is_divided = (power > 0) == (name == "div")
        if is_divided and rows.mine == 1:
            return "", False, sums or means  # losses of single samples, added by the script, are averages too
        is_twice = is_divided and means
        return "divides an average by the number of samples" if is_twice else "", means, sums and is_divided
    count = number if name == "div" or not number else round(1 / number, 6)
    is_counted = count == rows.mine if name != "div" else not number or rows.all != count >= rows.mine
    return "", sums and not is_counted, False


def _mixes(
    name: str,
    arguments: Mapping[str, Any],
    operands: Sequence[Traced],
    probe: Any,
    order: Order,
    mine: int,
) -> str:
    """In words, how an operation mixes the samples of a batch; "" where it does not."""
    is_along, source = name in _MOVING | _COMPARING, operands[0].probe if operands else None
    dims = _dims(arguments, source.dim()) if is_along and source is not None else set()
    if source is not None and any(stands_for_samples(source.shape[dim]) for dim in dims):
        if name in _COMPARING:
            return _COMPARES
        # with a known order it is harmless until samples in another order are combined with it
        return "" if order else _MOVES
    batches = [operand for operand in operands if operand.sure and operand.has_batch]
    if len({batch.order for batch in batches} - {None}) > 1 and name not in _PICKS:
        return _MOVES
    # a single sample with all samples; in a share of one sample these are the same
    has_single = any(operand.order and not operand.has_batch for operand in operands)
    makes_pairs = mine > 1 and bool(batches) and has_single
    makes_pairs |= isinstance(probe, torch.Tensor) and sum(map(stands_for_samples, probe.shape)) > 1
    return "makes pairs of the samples of a batch" if makes_pairs else ""


def mixed_by_copy(target: Traced, source: Traced) -> str:
    """In words, how a copy into a part of a tensor mixes samples; "" where it does not."""
    if source.averaged is not None and source.averaged.does:
        return source.averaged.does
    moves = source.sure and source.has_batch and target.has_batch
    moves &= len({target.order, source.order} - {None}) > 1
    return f"{_MOVES} ({users_line()})" if moves else ""


def order_kept(func: Any, operands: Sequence[Traced], has_batch: bool) -> Order:
    """The order of the samples in an operation's result, also in a sum of single samples; zeros_like of a single sample
    is not that sample."""
    if torch.Tag.nondeterministic_seeded in func.tags and "dropout" not in func._opname:
        return None
    sources = () if _uses_only_sizes(func._opname) and not has_batch else operands
    orders = [source.order for source in sources if source.has_batch == has_batch]
    if orders and set(orders) == {None}:
        return None
    singles = [*chain(*filter(None, orders))]
    is_sum = func._opname.removesuffix("_") in _ADDING and not has_batch and len({*singles}) == len(singles)
    return tuple(singles) if is_sum else next(filter(None, orders), ())


def draws_for_moved(func: Any, operands: Sequence[Traced]) -> bool:
    """Whether an operation draws for samples in another order than the batch's, or uses what was drawn for them."""
    is_drawn = torch.Tag.nondeterministic_seeded in func.tags
    is_drawn |= any(operand.order is None for operand in operands)
    return is_drawn and any(operand.order and operand.has_batch for operand in operands)


def _uses_only_sizes(name: str) -> bool:
    return name.endswith("_like") or name.startswith("new_")


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list | tuple) and value else value


def arguments_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    arguments: dict[str, Any] = {argument.name: argument.default_value for argument in func._schema.arguments}
    return arguments | dict(zip(arguments, args, strict=False)) | kwargs


def _dims(arguments: Mapping[str, Any], count: int) -> set[int]:
    """The dimensions that an operation goes along; all where it is given none."""
    given = arguments.get("dim", arguments.get("dims"))
    dims = [given] if isinstance(given, int) else given
    return {dim % count for dim in dims} if dims else {*range(count)}
