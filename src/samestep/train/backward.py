"""Weighs a rank's loss by its share where backward begins, so that averaged gradients are the whole batch's.

Example: of a batch of 5 samples rank 0 of 2 has 3, and DDP averages over ranks. Rank 0's mean loss is multiplied by
3 * 2 / 5 and rank 1's by 2 * 2 / 5: the average of both gradients is that of the mean over all 5 samples.

Covered: `backward()` and `torch.autograd.grad`, whether the loss was computed by the model, by its parts or from its
weights alone. Not covered: gradients under `torch.func`, and one backward through batches with different shares. In
that only the calls of a replica are weighed.
"""

import sys
import weakref
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist

from samestep.train.first_losses import FirstLosses
from samestep.train.group.control import users_line
from samestep.train.group.group import Group, Member
from samestep.train.loss import kind_of, leaves_before, name_of, nodes_before, reduction_of
from samestep.train.passes import Pass
from samestep.train.script.lines import scripts_frame
from samestep.train.script.sizes import is_over_samples
from samestep.train.step import Spine, spine
from samestep.train.subscriber import Subscriber

# backward() and grad() both look up _engine_run_backward here; torch 2.13 has no public hook for both
_AUTOGRAD: Any = torch.autograd
_ELEMENTWISE = ("Add", "Sub", "Mul", "Div", "Neg", "Clone", "Sqrt", "Rsqrt", "Pow", "Lerp", "ToCopy")
_MOST_NODES = 1000
_REAL = (torch.Tensor, torch.nn.Parameter)


class SumOverRanks(torch.autograd.Function):
    """Sum over ranks; its gradient is summed too, since every rank's loss depends on the sum."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, call: str) -> torch.Tensor:
        ctx.call = call
        total = part.clone(memory_format=torch.contiguous_format)
        with spine().group.waiting(call):
            dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return SumOverRanks.apply(gradient, ctx.call), None  # type: ignore[no-untyped-call]


class Backward(Member):
    """Replaces the function through which torch enters its autograd engine."""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self._spine = group.the(Spine)
        self._is_running = False
        self._first_losses = FirstLosses(group)
        self._original: Callable[..., Any] = _AUTOGRAD._engine_run_backward
        self._replacement = self._run
        _AUTOGRAD._engine_run_backward = self._replacement

    def close(self) -> None:
        if _AUTOGRAD._engine_run_backward is self._replacement:
            _AUTOGRAD._engine_run_backward = self._original

    def _run(self, outputs: Sequence[Any], gradients: Sequence[Any], *args: Any, **options: Any) -> Any:
        self._spine.derives_twice |= bool(args[1])  # create_graph
        # a checkpointed segment runs backward inside of backward, torch.compile runs the engine on fake tensors
        if self._is_running or type(outputs[0]) not in _REAL or is_functional():
            return self._original(outputs, gradients, *args, **options)
        self._is_running = True
        way = self._run_backward if options["accumulate_grad"] else self._run_grad
        try:
            return way(outputs, gradients, *args, **options)
        finally:
            self._is_running = False
            self._spine.weights.end()

    def _run_backward(
        self, outputs: Sequence[Any], gradients: Sequence[Any], *args: Any, **options: Any
    ) -> Any:
        spine = self._spine
        spine.backwards += 1
        loss = self._first_losses.whole(outputs[0], gradients[0])
        spine.tell(Subscriber.backward_begins, loss)
        if loss.numel() == 1:
            spine.origins.losses.append(loss.detach())
        inputs = set(map(id, args[2]))
        # an attack derives the loss by its input alone, and trains nothing
        if not inputs or not inputs.isdisjoint(map(id, spine.models.parameters())):
            self._first_losses.look_at(loss)
        spine.weights.begin(spine.weights.of_next_loss(spine.models))
        spine.weights.of_leaves = self._weight_for_inputs(outputs) if spine.weights.needs_leaves else 1.0
        spine.weights.of_calls.clear()
        if spine.origins.at_hand is not None:
            self._note_backward(spine.origins.at_hand.of, outputs[0])
        with self.group.within("backward"), spine.models.exchanging():
            return self._original(outputs, _times(gradients, spine.weights.of_loss), *args, **options)

    def _note_backward(self, this: Pass, loss: torch.Tensor) -> None:
        if not this.has_backward:
            parameters = set(map(id, self._spine.models.parameters()))
            this.has_backward = True
            # an attack and a map of what matters derive by an input
            this.derives_weights = all(id(leaf) in parameters for leaf in leaves_before(loss))

    def _run_grad(
        self,
        outputs: Sequence[Any],
        gradients: Sequence[Any],
        retain_graph: bool,
        create_graph: bool,
        inputs: Sequence[Any],
        *args: Any,
        **options: Any,
    ) -> Any:
        """Collective for gradients of equal tensors with create_graph, but not in a loop over samples (as MAML's)."""
        spine, size = self._spine, self.group.world.size
        share = spine.origins.trained
        is_of_sample = False
        if size > 1 and share is not None:
            is_of_sample = is_over_samples(scripts_frame(sys._getframe(1)), share.mine or share.all)
        is_in_forward = self.group.phase[0] == "forward"
        weights = spine.models.parameters() if is_in_forward or is_of_sample else ()
        are_weights = {weight.shape for weight in weights}.issuperset(tensor.shape for tensor in inputs)
        if is_in_forward and are_weights:
            # gradients of weights inside of forward are of some samples only, as of each task of MAML
            mine = share.mine if create_graph and share and 1 < share.mine < share.all else 0
            terms = kind_of(reduction_of(outputs[0]), share)[1] if mine and outputs[0].numel() == 1 else None
            if mine and not (terms and terms % mine):
                self.group.say(
                    f"torch.autograd.grad ({users_line()}) derives weights inside a model's forward, of this rank's "
                    "samples alone; if all samples of the batch are meant, call it outside of forward",
                    what="slopes in forward",
                )
            return self._original(outputs, gradients, retain_graph, create_graph, inputs, *args, **options)
        # ranks may have different numbers of microbatches, so no collective is possible in a microbatch
        is_whole = not is_of_sample and (share is None or share.microbatch is None)
        is_shared = size > 1 and spine.models.weighs_losses and is_whole
        parameters = {id(tensor) for tensor in spine.models.parameters()} if is_shared else set()
        are_equal = [_is_equal_on_ranks(tensor, parameters) for tensor in inputs]
        spine.weights.of_loss = spine.weights.of_leaves = spine.weights.of_next_loss(spine.models)
        if is_of_sample:
            weight = self._weight_for_parameters(inputs, create_graph=False) if are_weights else 1.0
        elif any(are_equal):
            weight = self._weight_for_parameters(inputs, create_graph=create_graph)
        else:
            weight = self._weight_for_inputs(outputs)
        weighed = _times(gradients, weight)
        slopes = self._original(outputs, weighed, retain_graph, create_graph, inputs, *args, **options)
        if not retain_graph:
            spine.weights.of_calls.clear()
        if not create_graph or not any(are_equal):
            if is_shared and outputs[0].numel() == 1:
                # gradients of inputs are divided by the whole batch's size, so ranks' gradients are terms of a sum
                spine.tell(Subscriber.slopes_given, (inputs, slopes, not any(are_equal)))
            return slopes
        call = f"torch.autograd.grad ({users_line()})"
        return tuple(
            SumOverRanks.apply(slope, call) / size if is_equal and slope is not None else slope  # type: ignore[no-untyped-call]
            for slope, is_equal in zip(slopes, are_equal, strict=True)
        )

    def _weight_for_parameters(self, parameters: Sequence[Any], *, create_graph: bool) -> float:
        """The factor of a loss where `grad` is asked for gradients of parameters."""
        if create_graph:
            return self._spine.weights.of_loss
        return 1 / self.group.world.size if self._spine.models.adds(parameters) else 1.0

    def _weight_for_inputs(self, outputs: Sequence[torch.Tensor]) -> float:
        """The factor of a loss for gradients of its inputs: those of a mean are divided by the whole batch's size."""
        spine = self._spine
        is_mean = (
            outputs[0].numel() == 1 and kind_of(reduction_of(outputs[0]), spine.origins.trained)[0] == "mean"
        )
        if (
            is_mean
            and not spine.models.adds()
            and (share := spine.origins.trained)
            and share.microbatch is None
        ):
            return spine.weights.of_loss / float(self.group.world.size)
        return 1.0 if spine.weights.of_loss else 0.0


class Hooks(Member):
    """Gives the script's hooks on activations and modules, and `retain_grad`, the gradients of the serial script."""

    # In backward a rank's gradient is multiplied by the share's weight. A hook that clips the gradient of an activation
    # has to see it without that weight.

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self._spine = group.the(Spine)
        if group.world.size > 1:
            self._replace(torch.Tensor, "register_hook", self._on_tensor)
            self._replace(torch.Tensor, "retain_grad", self._retaining)
            self._replace(torch.nn.Module, "register_full_backward_hook", self._on_module)

    def _replace(self, owner: type, name: str, registering: Callable[[Any], Any]) -> None:
        original = getattr(owner, name)
        self.group.replace(owner, name, wraps(original)(registering(original)))

    def _factor(self, is_weighed_inside: bool) -> float:
        """What takes a gradient of the running backward to the serial script's."""
        # With loss="sum" the weight is applied inside of the model's call, and not where backward begins.
        return 1.0 / self.group.world.size if is_weighed_inside else self._spine.weights.to_leaf

    def _on_tensor(self, register_hook: Callable[..., Any]) -> Callable[..., Any]:
        def registered(tensor: torch.Tensor, hook: Callable[..., Any]) -> Any:
            # under a function mode, such as that of set_default_device, torch calls this function a second time
            is_counted = hasattr(hook, "_counts_by_share")
            if tensor.grad_fn is None or is_counted or torch.compiler.is_compiling():
                return register_hook(tensor, hook)
            self._spine.weights.needs_leaves = True
            is_inside = self._spine.inside_model > 0 and self._spine.models.adds()

            def counted(gradient: torch.Tensor) -> torch.Tensor | None:
                factor = self._factor(is_inside)
                changed = hook(gradient * factor)
                return None if changed is None else changed / factor

            counted._counts_by_share = True  # type: ignore[attr-defined]
            return register_hook(tensor, counted)

        return registered

    def _retaining(self, retain_grad: Callable[..., Any]) -> Callable[..., Any]:
        def retained(tensor: torch.Tensor) -> None:
            is_kept = tensor.retains_grad or tensor.grad_fn is None
            retain_grad(tensor)
            if is_kept or torch.compiler.is_compiling():
                return
            held = weakref.ref(tensor)

            def keep(gradient: torch.Tensor) -> None:
                if (kept := held()) is not None:
                    total = gradient if kept.grad is None else kept.grad + gradient
                    # torch writes the weighed gradient after this hook
                    _AUTOGRAD.Variable._execution_engine.queue_callback(partial(setattr, kept, "grad", total))

            tensor.register_hook(keep)  # type: ignore[no-untyped-call]

        return retained

    def _on_module(self, register: Callable[..., Any]) -> Callable[..., Any]:
        def registered(module: torch.nn.Module, hook: Callable[..., Any], *args: Any, **options: Any) -> Any:
            self._spine.weights.needs_leaves = True

            def counted(module: torch.nn.Module, of_inputs: Any, of_outputs: Any) -> Any:
                models = self._spine.models
                factor = self._factor(models.adds() and models.holds(module))
                changed = hook(module, _times(of_inputs, factor), _times(of_outputs, factor))
                if changed is None:
                    return None
                return _times(changed if isinstance(changed, tuple) else (changed,), 1 / factor)

            return register(module, counted, *args, **options)

        return registered


def _times(gradients: Sequence[Any], factor: float) -> tuple[Any, ...]:
    return tuple(grad if grad is None or factor == 1.0 else grad * factor for grad in gradients)


def is_functional() -> bool:
    """Whether torch.func or a batched gradient is running; what they compute is not weighed."""
    return torch._C._functorch.maybe_current_level() is not None


def _is_equal_on_ranks(tensor: Any, parameters: set[int]) -> bool:
    """Whether a tensor is equal on all ranks: a parameter, a step from one (MAML's fast weights), a scalar (IRM's)."""
    if not isinstance(tensor, torch.Tensor) or not parameters or tensor.grad_fn is None:
        is_single = not tensor.dim() or (isinstance(tensor, torch.nn.Parameter) and tensor.numel() == 1)
        return id(tensor) in parameters or (bool(parameters) and is_single and not tensor._is_view())

    def is_elementwise(node: Any) -> bool:
        return name_of(node).startswith(_ELEMENTWISE)

    def is_of_all(node: Any) -> bool:
        variable = getattr(node, "variable", None)
        if variable is None:
            return is_elementwise(node) or name_of(node) == SumOverRanks.__name__
        return id(variable) in parameters and variable.shape == tensor.shape

    nodes = list(nodes_before(tensor.grad_fn, _MOST_NODES + 1, is_elementwise))
    return len(nodes) <= _MOST_NODES and all(map(is_of_all, nodes))
