"""Gradients that count as much as the share of the batch they were computed from."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from samestep.errors import UsageError
from samestep.train.nested import map_tensors
from samestep.train.step import Share, Spine, spine


class _Scaled(torch.autograd.Function):
    """Tensors times one factor, whose gradients are multiplied by another.

    A gradient in a graph of its own, such as a gradient penalty's, has the factor already: where it is differentiated
    the two change places, and it is not weighed again.
    """

    @staticmethod
    def forward(ctx: Any, forth: float, back: float, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.factors = back, forth
        ctx.set_materialize_grads(False)
        return tuple(times(tensor, forth) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        found = [gradient for gradient in gradients if gradient is not None]
        scaled = iter(_Scaled.apply(*ctx.factors, *found))  # type: ignore[no-untyped-call]
        return (None, None, *(None if gradient is None else next(scaled) for gradient in gradients))


def times(gradient: torch.Tensor, weight: float) -> torch.Tensor:
    """The gradient times the weight; with weight 0 it is 0, also where it is not a number."""
    return gradient * weight if weight else torch.zeros_like(gradient)


def weighed_call(
    forward: Callable[..., Any], weight: float, at: Spine, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """The output of forward, with the gradients of its parameters, and not of its inputs, times weight.

    So a model whose inputs are another model's outputs does not weigh that model's gradients again.
    """
    if weight == 1.0:
        return forward(*args, **kwargs)
    if weight:
        args, kwargs = _weighed((args, kwargs), 1 / weight)
    at.inside_model += 1
    try:
        output = forward(*args, **kwargs)
    finally:
        at.inside_model -= 1
    return _weighed(output, weight)


def _weighed(value: Any, weight: float) -> Any:
    found: dict[int, torch.Tensor] = {}

    def note(tensor: Any) -> Any:
        if tensor.requires_grad:
            found[id(tensor)] = tensor
        return tensor

    map_tensors(note, value)
    if not found:
        return value
    changed = dict(zip(found, _Scaled.apply(1.0, weight, *found.values()), strict=True))  # type: ignore[no-untyped-call]
    return map_tensors(lambda tensor: changed.get(id(tensor), tensor), value)


def share_weight(share: Share | None, size: int, *, sums: bool) -> float:
    """What a gradient is multiplied by before DDP averages over ranks; where losses are sums, they are added."""
    if sums:
        return 0.0 if share is not None and share.lent else float(size)
    return 1.0 if share is None else share.weight(size)


def weigh_gradient(gradient: torch.Tensor | None, *, sums: bool) -> torch.Tensor | None:
    """As a parameter's hook: what a microbatch adds to its gradient counts by the samples of that microbatch."""
    at = spine()
    share = at.trained
    if gradient is None or share is None or share.microbatch is None:
        return None
    return times(gradient, share_weight(share, at.group.world.size, sums=sums))


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
            tensor.register_hook(lambda _: call())  # type: ignore[no-untyped-call]
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
