"""Operations that make a number of one sample from others of its batch: on a share they are not the serial script's."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from samestep.train.batch_sizes import Kinds, Other
from samestep.train.group.control import users_line

_MOVING = {"flip", "roll"}
_COMPARING = {"sort", "topk", "kthvalue", "median", "cumsum", "_softmax", "_log_softmax"}
# of averages over samples these are such, and of two of them these are none
_LINEAR = {
    *(
        "add",
        "sub",
        "rsub",
        "neg",
        "sum",
        "mean",
        "clone",
        "detach",
        "alias",
        "view",
        "_unsafe_view",
        "expand",
    ),
    *(
        "squeeze",
        "unsqueeze",
        "stack",
        "cat",
        "select",
        "slice",
        "split",
        "unbind",
        "t",
        "permute",
        "transpose",
    ),
    *("diagonal", "index", "index_select", "gather", "_to_copy", "nan_to_num", "repeat", "_reshape_alias"),
}
_PICKS = {"select", "slice", "split", "split_with_sizes", "unbind", "index", "index_select", "gather"}
_PRODUCTS = {"mul", "mm", "bmm", "dot", "mv", "addmm"}


def mixes(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], kinds: Kinds, of: Other, pair: tuple[Any, Any]
) -> str:
    """What it does to the samples, of which `of` is its first argument; `pair` is what it made, and of another batch.

    What only shows numbers, without a gradient, may compare samples.
    """
    name, (made, other) = func._opname, pair
    has_gradient = any(isinstance(one, torch.Tensor) and one.requires_grad for one in args)
    if name in _MOVING or (name in _COMPARING and has_gradient):
        found = kinds.batch_known_in(of)
        if (
            found is not None
            and not found[1].ragged
            and found[0] in _dims(func, args, kwargs, of.tensor.dim())
        ):
            return "moves samples within a batch" if name in _MOVING else "compares the samples of a batch"
    if has_gradient and isinstance(made, torch.Tensor) and isinstance(other, torch.Tensor):
        of_batch = (kinds.samples.mine, kinds.samples.size)
        if sum(sizes == of_batch for sizes in zip(made.shape, other.shape, strict=False)) > 1:
            return "makes pairs of the samples of a batch"
    return ""


def averaged(func: Any, given: Sequence[Other], pair: tuple[Any, Any]) -> str | None:
    """How what it made depends on averages over this rank's samples: None not at all, "" so that the average over ranks
    is the whole batch's, else the line where that ends, as where two averages are multiplied.
    """
    name, (made, other) = func._opname, (pair if isinstance(pair[0], torch.Tensor) else map(_first, pair))
    if not isinstance(made, torch.Tensor) or not made.is_floating_point() or name.endswith("_like"):
        return None
    if torch._C._current_autograd_node() is not None:
        return None  # slopes are another rule's affair
    known = [one.averaged for one in given if one.averaged is not None]
    if any(known):
        return next(filter(None, known))
    is_batch = [one.other is not None and one.other.shape != one.tensor.shape for one in given]
    # what has the shape of a batch and is none comes of a guess that led to nothing
    of_batch = {one.tensor.shape for one, has_it in zip(given, is_batch, strict=True) if has_it} - {
        made.shape
    }
    is_reduced = bool(of_batch) and isinstance(other, torch.Tensor) and other.shape == made.shape
    if not known and (not is_reduced or name in _PICKS):
        return None
    is_average = name in _LINEAR or (is_reduced and not known and ("_loss" in name or name in _PRODUCTS))
    if known and name in _PRODUCTS:
        is_average = len(known) == 1 and not any(is_batch)
    elif known and name == "div":
        # whether ranks divide by numbers of terms that fit, is compared in backward
        has_slope = [one.averaged is not None and one.tensor.requires_grad for one in given]
        is_average = given[0].averaged is not None and not any(is_batch[1:] + has_slope[1:])
    return "" if is_average else users_line()


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
