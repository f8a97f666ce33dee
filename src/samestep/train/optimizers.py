"""What an optimizer steps belongs to a replica, and a closure's loss is everyone's; said or made right before a step.

Covered: parameters that no replica holds and whose gradients differ between ranks, optimizers that branch on the
loss of a closure (LBFGS). Not covered: updates written by hand.
"""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from samestep.errors import UsageError
from samestep.train import totals
from samestep.train.backward import Backward
from samestep.train.digest import bit_sums
from samestep.train.group.group import Group, Member
from samestep.train.step import Spine

_FIRST_STEPS = 3


class Optimizers(Member):
    """Tells of every optimizer step; at more than one rank it looks at the first ones of a loop."""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self._spine = group.the(Spine)
        self._steps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(lambda *_: group.enter("user")),
        ]
        group.the(Backward)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        self.group.enter("optimizer")
        if self._spine.at_hand is None or self.group.world.size == 1:
            return None
        steps = self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        if steps <= _FIRST_STEPS:
            self._check_owners(optimizer)
        if isinstance(optimizer, torch.optim.LBFGS):
            # step(self, closure): torch gives the optimizer itself as the first argument
            closure = args[1] if len(args) > 1 else kwargs["closure"]
            return (args[0], self._everyones(closure)), {}
        return None

    def _check_owners(self, optimizer: Any) -> None:
        """Collective where a parameter with a gradient belongs to no replica: its gradients have to be equal."""
        held = {id(one) for one in self._spine.models.parameters()}
        stepped = [one for group in optimizer.param_groups for one in group["params"]]
        loose = [one for one in stepped if one.grad is not None and id(one) not in held]
        if not loose:
            return
        digest = bit_sums([one.grad for one in loose if one.grad is not None])
        call = f"samestep's check of {type(optimizer).__name__}.step"
        if len(set(self.group.all_gather(call, digest))) > 1:
            raise UsageError(
                f"{type(optimizer).__name__} steps {_name_of(loose[0])}, which belongs to no replica: its gradient "
                "differs on each rank; write model = samestep.replicate(model) before the loop"
            )

    def _everyones(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """LBFGS decides by the loss, so it has to be that of the whole batch on every rank."""
        sums = self._spine.models.adds()

        def of_all() -> Any:
            loss = closure()
            value = loss.detach() if isinstance(loss, torch.Tensor) else loss
            return totals.sum(value) if sums else totals.mean(value)

        return of_all


def _name_of(parameter: torch.Tensor) -> str:
    """`fc.weight of Net`, found among all living modules."""
    roots = [one for one in gc.get_objects() if isinstance(one, torch.nn.Module)]
    names = [
        (len(name), f"{name} of {type(root).__name__}")
        for root in roots
        for name, other in root.named_parameters()
        if other is parameter
    ]
    return max(names)[1] if names else f"a parameter of shape {list(parameter.shape)}"
