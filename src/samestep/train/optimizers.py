"""Before an optimizer's step: refuses parameters that differ between ranks, and gives a closure the whole batch's loss.

Covered: parameters that belong to no replica and whose gradients differ between ranks, gradients of the whole batch
that the script adds over the ranks again, optimizers that branch on the loss of a closure (LBFGS). Not covered: updates
written by hand.
"""

import math
import sys
import weakref
from collections.abc import Callable
from functools import wraps
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from samestep.errors import UsageError
from samestep.text import counted
from samestep.train import totals
from samestep.train.backward import Backward
from samestep.train.digest import bit_sums
from samestep.train.forgotten import say_if_unshared
from samestep.train.group.alive import Hidden, alive
from samestep.train.group.control import users_line
from samestep.train.group.group import Group, Member
from samestep.train.script.lines import scripts_frame
from samestep.train.step import Spine
from samestep.train.subscriber import Subscriber

_FIRST_STEPS = 3


class Optimizers(Member, Subscriber):
    """Notes every optimizer step as a phase; with several ranks it checks the first steps of each optimizer."""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self._spine = group.the(Spine)
        self._steps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self.used: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        group.the(Backward)
        self._made = list[weakref.ref[Any]]()  # since the latest backward
        if group.world.size > 1:
            self._spine.subscribe(self)
            self._made += map(weakref.ref, alive(torch.optim.Optimizer, group.hidden))
            adds = torch.optim.Optimizer.add_param_group
            group.replace(torch.optim.Optimizer, "add_param_group", self._noting(adds))
        # the norms of gradients before the script adds those of all ranks, while first steps are looked at
        self._before_sum: dict[str, list[tuple[torch.Tensor, float]]] | None = {}
        self._all_reduce_of_torch = group.replace(dist, "all_reduce", self._all_reduce)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _noting(self, add_param_group: Callable[..., None]) -> Callable[..., None]:
        @wraps(add_param_group)
        def noted(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            add_param_group(optimizer, *args, **kwargs)
            self._made.append(weakref.ref(optimizer))

        return noted

    def backward_begins(self, loss: torch.Tensor) -> None:
        """Give new optimizers' tensors that are in no replica the gradient of this rank's loss."""
        if not self._made:
            return
        optimizers, self._made = [made() for made in self._made], []
        replicated = {id(parameter) for parameter in self._spine.models.parameters()}
        for group in chain(*(optimizer.param_groups for optimizer in optimizers if optimizer)):
            for tensor in group["params"]:
                if tensor.requires_grad and id(tensor) not in replicated:
                    self._spine.weights.give_own(tensor)

    def _all_reduce(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(1)
        if self._before_sum is not None and scripts_frame(frame) is frame:
            address, leaves = tensor.data_ptr(), (p for p in self._spine.models.parameters() if p.is_leaf)
            if any(p.grad is not None and p.grad.data_ptr() == address for p in leaves):
                self._before_sum.setdefault(users_line(), []).append((tensor, float(tensor.norm())))
        return self._all_reduce_of_torch(tensor, *args, **kwargs)

    def _say_if_summed(self) -> None:
        """Say that the script adds gradients of ranks that are those of the whole batch already."""
        size = self.group.world.size
        for line, before in (self._before_sum or {}).items():
            factors = [float(grad.norm()) / norm for grad, norm in before if norm]
            if factors and all(math.isclose(factor, size, rel_tol=1e-4) for factor in factors):
                self.group.say(
                    f"dist.all_reduce ({line}) adds gradients that are the whole batch's on every rank already, so the "
                    f"step is taken with {size} times the serial script's gradient; leave it out",
                    what="summed",
                )

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        self.group.enter("user")
        self.used[optimizer] = self._spine.backwards

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        self.group.enter("optimizer")
        if self.group.world.size == 1:
            return None
        steps = self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        self._say_if_held_back(optimizer)
        if self._spine.origins.at_hand is None:
            if steps == 1 and any(tensor.grad is not None for tensor in self._spine.models.parameters()):
                say_if_unshared(self.group, f"{type(optimizer).__name__}.step ({users_line()})")
            return None
        if steps == 1:
            self._say_if_amplified(optimizer)
        if steps <= _FIRST_STEPS:
            self._check_owners(optimizer)
        self._say_if_summed()
        self._before_sum = {} if steps < _FIRST_STEPS else None
        if isinstance(optimizer, torch.optim.LBFGS):
            # step(self, closure): torch gives the optimizer itself as the first argument
            closure = args[1] if len(args) > 1 else kwargs["closure"]
            return (args[0], self._of_whole_batch(closure)), {}
        return None

    def _say_if_held_back(self, optimizer: Any) -> None:
        if self._spine.models.holds_back(chain(*(group["params"] for group in optimizer.param_groups))):
            self.group.say(
                f"{type(optimizer).__name__}.step ({users_line()}) takes gradients of each rank's own share, since "
                "the latest backward() was inside no_sync, or in a microbatch that is not the step's last; let "
                "the last backward() before a step be outside of it",
                what="held back",
            )

    def _say_if_amplified(self, optimizer: Any) -> None:
        """Say that an optimizer divides gradients by their size where these are zero but for rounding."""
        undone = [p for group in optimizer.param_groups for p in group["params"] if self._spine.is_undone(p)]
        if undone and "eps" in optimizer.defaults:
            name, kind = self._spine.models.name_of(undone[0]), type(optimizer).__name__
            others = len(undone) - 1
            which = f"{name} and {counted(others, 'other')} are biases" if others else f"{name} is a bias"
            self.group.say(
                f"{which} before a BatchNorm, which takes it away again: its gradient is rounding alone, and {kind} "
                "makes steps of that, so later numbers, first those of an evaluation, differ from the serial script's; "
                "write bias=False in layers before a BatchNorm",
                what="amplified",
            )

    def _check_owners(self, optimizer: Any) -> None:
        """Collective where a parameter belongs to no replica: its gradient has to be equal on all ranks."""
        replicated = {id(parameter) for parameter in self._spine.models.parameters()}
        stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        unowned = [p for p in stepped if p.grad is not None and id(p) not in replicated]
        if not unowned:
            return
        digest = bit_sums(p.grad for p in unowned)
        call = f"samestep's check of {type(optimizer).__name__}.step"
        if len(set(self.group.all_gather(call, digest))) > 1:
            name = _name_of(unowned[0], self.group.hidden)
            if name:
                remedy = (
                    "write model = samestep.replicate(model) before the loop, and for a copy that is trained "
                    "samestep.replicate(copy)"
                )
            else:
                name = f"a tensor of shape {list(unowned[0].shape)}"
                total = "sum" if self._spine.models.adds() else "mean"
                remedy = f"with t for the tensor write t.grad = samestep.{total}(t.grad) after backward()"
            raise UsageError(
                f"{type(optimizer).__name__} steps {name}, which belongs to no replica: its gradient differs on each "
                f"rank; {remedy}"
            )

    def _of_whole_batch(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure whose loss is the whole batch's: LBFGS branches on it, so it has to be equal on all ranks."""
        sums = self._spine.models.adds()

        def averaged() -> Any:
            loss = closure()
            value = loss.detach() if isinstance(loss, torch.Tensor) else loss
            return totals.sum(value) if sums else totals.mean(value)

        return averaged


def _name_of(parameter: torch.Tensor, hidden: Hidden) -> str:
    """`fc.weight of Net`, found among all modules in memory; empty if none has the parameter."""
    names = [
        (len(name), f"{name} of {type(root).__name__}")
        for root in alive(torch.nn.Module, hidden)
        for name, named in root.named_parameters()
        if named is parameter
    ]
    return max(names)[1] if names else ""
