"""Gradients that count as much as the share of the batch they were computed from."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from samestep.errors import UsageError
from samestep.train.loss import leaves_before
from samestep.train.nested import map_tensors
from samestep.train.step import Share, Spine, spine

_IN = "in"
_OUT = "out"
_MOST_NODES = 20


class _Weighed(torch.autograd.Function):
    """Gradients that enter a model count as its batch does, and those that leave it as they did before.

    What enters lacks the part of the batch's weight that the loss does not have; in most scripts it lacks nothing.
    Where a gradient with a graph of its own, such as a gradient penalty's, is derived, in and out change places.
    """

    @staticmethod
    def forward(
        ctx: Any, weight: float, way: str, factor: float, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.weight, ctx.way, ctx.factor = weight, way, factor
        ctx.set_materialize_grads(False)
        return tuple(times(tensor, factor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        at, way = spine(), ctx.way
        lacks = at.lacks(ctx.weight)
        factor = ctx.factor * lacks if way == _IN else ctx.factor / (lacks or 1.0)
        if factor == 1.0 and not torch.is_grad_enabled():
            return (None, None, None, *gradients)
        found = [gradient for gradient in gradients if gradient is not None]
        other_way = _OUT if way == _IN else _IN
        scaled = iter(_Weighed.apply(ctx.weight, other_way, factor, *found))  # type: ignore[no-untyped-call]
        return (None, None, None, *(None if gradient is None else next(scaled) for gradient in gradients))


def times(gradient: torch.Tensor, weight: float) -> torch.Tensor:
    """The gradient times the weight; with weight 0 it is 0, also where it is not a number."""
    return gradient * weight if weight else torch.zeros_like(gradient)


def weighed_call(
    forward: Callable[..., Any], weight: float, at: Spine, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """The output of forward, with the gradients of its parameters, and not of its inputs, times weight.

    So a model whose inputs are another model's outputs does not weigh that model's gradients again.
    """
    if not torch.compiler.is_compiling():
        map_tensors(partial(_count_in_leaves, at), (args, kwargs))
    if weight == 1.0:
        return forward(*args, **kwargs)
    args, kwargs = _weighed((args, kwargs), weight, _OUT)
    at.inside_model += 1
    try:
        output = forward(*args, **kwargs)
    finally:
        at.inside_model -= 1
    return _weighed(output, weight, _IN)


def _weighed(value: Any, weight: float, way: str) -> Any:
    found: dict[int, torch.Tensor] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            found[id(tensor)] = tensor
        return tensor

    map_tensors(note, value)
    if not found:
        return value
    weighed = _Weighed.apply(weight, way, 1.0, *found.values())  # type: ignore[no-untyped-call]
    changed = dict(zip(found, weighed, strict=True))
    return map_tensors(lambda tensor: changed.get(id(tensor), tensor), value)


def _count_in_leaves(at: Spine, tensor: torch.Tensor) -> torch.Tensor:
    """The gradient of what is no parameter, such as x.grad, divides by the whole batch as the serial script's does."""

    def counted(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * (at.leaves / at.root) if at.root else gradient

    for leaf in leaves_before(tensor, _MOST_NODES) if tensor.requires_grad else ():
        if not isinstance(leaf, torch.nn.Parameter) and not hasattr(leaf, "_counts_by_share"):
            leaf.register_hook(counted)  # type: ignore[no-untyped-call]
            leaf.__dict__["_counts_by_share"] = at.asks_for_leaves = True
    return tensor


def share_weight(share: Share | None, size: int, *, sums: bool) -> float:
    """What a gradient is multiplied by before DDP averages over ranks; where losses are sums, they are added."""
    if sums:
        return 0.0 if share is not None and share.lent else float(size)
    return 1.0 if share is None else share.weight(size)


def drop_gradient(at: Spine, gradient: torch.Tensor) -> torch.Tensor | None:
    """As a parameter's hook: where the loss counts for nothing, it may be no number."""
    if at.root:
        return None
    if not torch.is_grad_enabled():
        return torch.zeros_like(gradient)
    # a gradient that is derived again keeps its graph: every rank reaches the sums over ranks in it
    return gradient.masked_fill(gradient.new_ones((), dtype=torch.bool), 0.0)


def only_in(microbatch: Share, at: Spine, output: Any) -> Any:
    """The output, through which backward may go only while its microbatch is at hand: later the weight is another."""
    if torch.compiler.is_compiling():
        return output  # or each microbatch would be compiled anew

    def check() -> None:
        if at.trained is not microbatch:
            raise UsageError(
                "backward() of a microbatch's loss came after the loop had left that microbatch; "
                "call it inside the loop over the step's microbatches"
            )

    on_backward(output, check)
    return output


def on_backward(output: Any, call: Callable[[], None]) -> None:
    """Call it whenever backward comes to a tensor of this output, before it comes to what that is made of."""

    def watch(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(lambda _: call())
        return tensor

    if not torch.compiler.is_compiling():
        map_tensors(watch, output)


def after_backward(call: Callable[[], None]) -> None:
    """Call it at the end of the backward that is going on, after what was asked for before."""
    # DDP and FSDP end backward so too; nothing public of torch 2.13 does.
    torch.autograd.Variable._execution_engine.queue_callback(call)


def refuse_opaque(output: Any) -> None:
    """Weighing would miss, without a word, the tensors of an object that only its class knows."""
    if isinstance(output, torch.Tensor):
        return
    inside = vars(output).values() if hasattr(output, "__dict__") else ()
    hidden = any(isinstance(value, torch.Tensor) and value.requires_grad for value in inside)
    if hidden and not isinstance(output, Mapping | tuple | list) and not dataclasses.is_dataclass(output):
        raise UsageError(
            f"forward returned a {type(output).__name__}, in which replicate cannot find the tensors; "
            "return tensors, or a tuple, dict or dataclass of them"
        )
