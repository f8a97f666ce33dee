"""Operations that make a number of one sample from others of its batch: on a share they are not the serial script's."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from samestep.train.batch_sizes import Kinds, Other

_MOVING = {"flip", "roll"}
_COMPARING = {"sort", "topk", "kthvalue", "median", "cumsum", "_softmax", "_log_softmax"}


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


def _dims(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], count: int) -> set[int]:
    """The dimensions that it goes along: those that are given, or all."""
    for at, argument in enumerate(func._schema.arguments):
        if argument.name in ("dim", "dims"):
            given = args[at] if at < len(args) else kwargs.get(argument.name, argument.default_value)
            dims = [given] if isinstance(given, int) else given
            return {dim % count for dim in dims} if dims else {*range(count)}
    return {*range(count)}
