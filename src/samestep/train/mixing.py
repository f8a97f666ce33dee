"""What makes a number of one sample from others of its batch, so that on a share it is not the serial script's.

The average of ranks' losses is the whole batch's where each is an average over samples. So averages over this rank's
samples may be added and weighed, and not multiplied with each other, compared or put under a root.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from samestep.train.batch_sizes import Other, stands_for_samples
from samestep.train.draw_sizes import number_in_line
from samestep.train.group.control import users_line
from samestep.train.loss import Averaged
from samestep.train.step import Rows

_MOVES = "moves samples within a batch"
_COMPARES = "compares the samples of a batch"
_MOVING = {"flip", "roll"}
_COMPARING = {"sort", "topk", "kthvalue", "median", "cumsum", "_softmax", "_log_softmax"}
_PICKS = {
    *("select", "slice", "split", "split_with_sizes", "unbind", "index", "index_select", "gather"),
    "_pack_padded_sequence",  # which takes lengths that were sorted with the samples
}
IN_PLACE = {"add_", "sub_", "mul_", "div_"}
# of averages over samples these are such, and of two of them products are none
_LINEAR = {
    *("add", "sub", "rsub", "neg", "sum", "mean", "clone", "detach", "alias", "nan_to_num", "_to_copy"),
    *("view", "_unsafe_view", "_reshape_alias", "expand", "repeat", "squeeze", "unsqueeze", "stack", "cat"),
    *("t", "permute", "transpose", "diagonal", *_PICKS),
}
_PRODUCTS = {"mul", "mm", "bmm", "dot", "mv", "addmm"}
_COUNTS = {"sum", "bincount"}
# as of a count that may be 0
_BOUNDS = {"clamp", "clamp_min", "maximum"}


def averaged(
    call: tuple[Any, Sequence[Any], dict[str, Any]],
    given: Sequence[Other],
    made: Any,
    other: Any,
    order: tuple[int, ...],
    rows: Rows,
) -> Averaged | None:
    """How what it made depends on averages over this rank's samples, None where not at all."""
    func, args, kwargs = call
    name, made, other = func._opname.removesuffix("_"), _first(made), _first(other)
    # what only has the sizes of another has none of its numbers, and slopes are another rule's affair
    if _is_of_sizes(name) or torch._C._current_autograd_node() is not None:
        return None
    known = [one.averaged for one in given if one.averaged is not None]
    is_batch = [one.has_batch for one in given]
    # of what is no number of the loss, only a choice among samples goes into it
    if not isinstance(made, torch.Tensor):
        return None
    is_count = name in _COUNTS or (known and (any(is_batch) or name in {"mul", *_LINEAR, *_BOUNDS}))
    if not (made.is_floating_point() or is_count):
        return None
    if mixed := next((one for one in known if one.does), None):
        return mixed
    arguments = arguments_of(func, args, kwargs)
    if does := _mixes(name, arguments, given, other, order, rows.mine):
        return Averaged(f"{does} ({users_line()})")
    is_sure = any(is_batch) and all(one.sure for one in given)
    is_reduced = is_sure and isinstance(other, torch.Tensor) and other.shape == made.shape
    if not known and (not is_reduced or name in _PICKS):
        return None
    of_model = any(one.of_model for one in known) or any(one.tensor.requires_grad for one in given)
    sums, means = any(one.sums for one in known), any(one.means for one in known)
    if not known:
        sums = arguments.get("reduction", 1 + (name in {*_COUNTS, *_PRODUCTS})) == 2
        means = not sums
    if not _is_average(name, given, is_batch, of_model=of_model):
        # what is no output, as a mask, is divided by the share's own number perhaps
        sums &= of_model
        does = f"computes with {'sums' if sums else 'averages'} over the samples of a batch"
    elif known and name in ("mul", "div"):
        does, sums, means = _weighed(name, args[1], sums, means, rows)
    return Averaged(f"{does} ({users_line()})" if does else "", of_model, sums, means)


def _is_average(name: str, given: Sequence[Other], is_batch: Sequence[bool], *, of_model: bool) -> bool:
    """Whether it adds and weighs averages and sums, and does nothing else with them."""
    known = [one.averaged for one in given if one.averaged is not None]
    if not known:
        return "_loss" in name or "cross_entropy" in name or name in _LINEAR | _PRODUCTS | _COUNTS
    if name in _PRODUCTS:
        others = [has_it for one, has_it in zip(given, is_batch, strict=True) if one.averaged is None]
        return len(known) == 1 and not any(others)
    if name == "div":
        above, *below = known
        if given[0].other is None:  # of terms that were picked, by their count
            return not above.of_model
        # of sums by sums that are none of outputs it is compared in backward whether such fit
        are_counts = all(above.sums and one.sums and not one.of_model for one in below)
        return given[0].averaged is above and not any(is_batch[1:]) and are_counts
    return name in _LINEAR or (name in _BOUNDS and not of_model)


def _weighed(name: str, by: Any, sums: bool, means: bool, rows: Rows) -> tuple[str, bool, bool]:
    """What a number does to sums and averages, whether there are sums, and averages of this rank's samples, then."""
    is_written_out, power = number_in_line(rows.mine)
    number = by if isinstance(by, int | float) else 0.0
    if is_written_out:
        return "", sums, means
    if number and power:
        is_divided = (power > 0) == (name == "div")
        if is_divided and rows.mine == 1:
            return "", False, sums or means  # samples that the script took one by one are averages too
        is_twice = is_divided and means
        return "divides an average by the number of samples" if is_twice else "", means, sums and is_divided
    count = number if name == "div" or not number else round(1 / number, 6)
    is_counted = count == rows.mine if name != "div" else not number or rows.all != count >= rows.mine
    return "", sums and not is_counted, False


def _mixes(
    name: str,
    arguments: Mapping[str, Any],
    given: Sequence[Other],
    other: Any,
    order: tuple[int, ...],
    mine: int,
) -> str:
    """What it does to the samples along their dimension, which it may make twice."""
    is_along, of = name in _MOVING | _COMPARING, given[0].other if given else None
    dims = _dims(arguments, of.dim()) if is_along and of is not None else set()
    if of is not None and any(stands_for_samples(of.shape[dim]) for dim in dims):
        if name in _COMPARING:
            return _COMPARES
        # as long as it is known in which order they are, it shows what comes of it
        return "" if order else _MOVES
    batches = [one for one in given if one.sure and one.has_batch]
    if len({one.order for one in batches}) > 1 and name not in _PICKS:
        return _MOVES
    # as of one sample with all others; a share of one sample is that sample
    are_twice = mine > 1 and bool(batches) and any(one.order and not one.has_batch for one in given)
    are_twice |= isinstance(other, torch.Tensor) and sum(map(stands_for_samples, other.shape)) > 1
    return "makes pairs of the samples of a batch" if are_twice else ""


def mixed_by_copy(into: Other, of: Other) -> str:
    """What it does to samples that a part of a tensor, `into`, gets those of another one."""
    if of.averaged is not None and of.averaged.does:
        return of.averaged.does
    moves = of.sure and of.has_batch and into.has_batch and into.order != of.order
    return f"{_MOVES} ({users_line()})" if moves else ""


def order_kept(name: str, given: Sequence[Other], has_batch: bool) -> tuple[int, ...]:
    """The order of the samples in what an operation makes; what only has the sizes of a single sample is none."""
    kept = () if _is_of_sizes(name) and not has_batch else given
    return next((one.order for one in kept if one.order and one.has_batch == has_batch), ())


def _is_of_sizes(name: str) -> bool:
    return name.endswith("_like") or name.startswith("new_")


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list | tuple) and value else value


def arguments_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """By name, with those that are not given."""
    known: dict[str, Any] = {argument.name: argument.default_value for argument in func._schema.arguments}
    return known | dict(zip(known, args, strict=False)) | kwargs


def _dims(arguments: Mapping[str, Any], count: int) -> set[int]:
    """The dimensions that it goes along: those that are given, or all."""
    given = arguments.get("dim", arguments.get("dims"))
    dims = [given] if isinstance(given, int) else given
    return {dim % count for dim in dims} if dims else {*range(count)}
