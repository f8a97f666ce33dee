"""Weighs the gradients of a replica's call by its share of the batch.

Example: `loss(model_b(model_a(x)))` with replicas a and b. Gradients are multiplied by the weight where they enter b
from the loss, and divided by it where they leave b at its inputs. So a's gradients are not weighed twice.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from samestep.errors import UsageError
from samestep.text import type_of
from samestep.train.loss import leaves_before
from samestep.train.nested import map_tensors
from samestep.train.passes import Share
from samestep.train.step import Spine, spine

_IN = "in"
_OUT = "out"
_MOST_NODES = 20


class _Weighed(torch.autograd.Function):
    """Identity whose backward multiplies gradients by the weight at a model's outputs, and divides at its inputs."""

    # The loss itself is weighed where backward begins, so the factor is only what is missing there, mostly 1. In a
    # double backward, as of a gradient penalty, the two directions change places.

    @staticmethod
    def forward(ctx: Any, weight: float, way: str, factor: float, tensor: torch.Tensor) -> torch.Tensor:
        ctx.weight, ctx.way, ctx.factor = weight, way, factor
        ctx.set_materialize_grads(False)
        return times(tensor, factor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        way, missing = ctx.way, spine().weights.missing(ctx.weight)
        factor = ctx.factor * missing if way == _IN else ctx.factor / (missing or 1.0)
        if gradient is not None and (factor != 1.0 or torch.is_grad_enabled()):
            other_way = _OUT if way == _IN else _IN
            gradient = _Weighed.apply(ctx.weight, other_way, factor, gradient)  # type: ignore[no-untyped-call]
        return None, None, None, gradient


def times(gradient: torch.Tensor, weight: float) -> torch.Tensor:
    """The gradient times the weight; with weight 0 it is 0, also where it is NaN."""
    return gradient * weight if weight else torch.zeros_like(gradient)


def weighed_call(
    forward: Callable[..., Any], weight: float, spine: Spine, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """The output of forward; in backward the gradients of its parameters, but not of its inputs, are weighed."""
    if not torch.compiler.is_compiling():
        map_tensors(partial(_weigh_leaves, spine), (args, kwargs))
    if weight == 1.0:
        return forward(*args, **kwargs)
    args, kwargs = _weighed((args, kwargs), weight, _OUT)
    spine.inside_model += 1
    try:
        output = forward(*args, **kwargs)
    finally:
        spine.inside_model -= 1
    return _weighed(output, weight, _IN)


def _weighed(value: Any, weight: float, way: str) -> Any:
    # Tensor by tensor: a node of all would hand None to the hooks of those that the loss does not reach. Each is kept
    # here, since its id would be another's once it is gone.
    changed: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def change(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad and id(tensor) not in changed:
            changed[id(tensor)] = tensor, _Weighed.apply(weight, way, 1.0, tensor)  # type: ignore[no-untyped-call]
        return changed[id(tensor)][1] if id(tensor) in changed else tensor

    weighed = map_tensors(change, value)
    return weighed if changed else value  # the same object: the model may write into it


def _weigh_leaves(spine: Spine, tensor: torch.Tensor) -> torch.Tensor:
    """Weigh the gradient of a leaf that is no parameter, such as x.grad."""
    for leaf in leaves_before(tensor, _MOST_NODES) if tensor.requires_grad else ():
        if not isinstance(leaf, torch.nn.Parameter):
            spine.weights.give_batchs(leaf)
    return tensor


def share_weight(share: Share | None, size: int, *, sums: bool) -> float:
    """The factor of a gradient before DDP averages over ranks; with `sums` the ranks' gradients are added."""
    if sums:
        return 0.0 if share is not None and share.lent else float(size)
    return 1.0 if share is None else share.weight(size)


def drop_gradient(spine: Spine, gradient: torch.Tensor | None) -> torch.Tensor | None:
    """A parameter's hook: where the loss has weight 0, the gradient is 0, also where it is NaN."""
    if spine.weights.of_loss or gradient is None:
        return None
    if not torch.is_grad_enabled():
        return torch.zeros_like(gradient)
    # in a double backward the graph has to stay: every rank has to reach the sums over ranks in it
    return gradient.masked_fill(gradient.new_ones((), dtype=torch.bool), 0.0)


def only_in(microbatch: Share, spine: Spine, output: Any) -> Any:
    """The output, with an error in backward once its microbatch is over: then the weight would be another's."""
    if torch.compiler.is_compiling():
        return output  # or each microbatch would be compiled anew

    def check() -> None:
        if spine.origins.trained is not microbatch:
            raise UsageError(
                "backward() of a microbatch's loss came after the loop had left that microbatch; "
                "call it inside the loop over the step's microbatches"
            )

    on_backward(output, check)
    return output


def on_backward(output: Any, call: Callable[[], None]) -> None:
    """Call `call` when backward reaches a tensor of this output, before it goes on to the tensor's inputs."""

    def watch(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(lambda _: call())
        return tensor

    if not torch.compiler.is_compiling():
        map_tensors(watch, output)


def after_backward(call: Callable[[], None]) -> None:
    """Call `call` at the end of the running backward, after earlier such calls."""
    # DDP and FSDP do the same; torch 2.13 has no public function for it
    torch.autograd.Variable._execution_engine.queue_callback(call)


def refuse_opaque(output: Any) -> None:
    """Raise for an output whose tensors map_tensors cannot find: their gradients would not be weighed."""
    if isinstance(output, torch.Tensor):
        return
    inside = vars(output).values() if hasattr(output, "__dict__") else ()
    hidden = any(isinstance(value, torch.Tensor) and value.requires_grad for value in inside)
    if hidden and not isinstance(output, Mapping | tuple | list) and not dataclasses.is_dataclass(output):
        raise UsageError(
            f"forward returned {type_of(output)}, in which replicate cannot find the tensors; "
            "return tensors, or a tuple, dict or dataclass of them"
        )
