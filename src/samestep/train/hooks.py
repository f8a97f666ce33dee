"""Gives the script's hooks on activations the gradient that the serial script's hooks get.

In backward a rank's gradient is multiplied by the share's weight. A hook that clips the gradient of an activation has
to see it without that weight. Not covered: hooks on modules, and `retain_grad`.
"""

from collections.abc import Callable
from typing import Any

import torch

from samestep.train.group.group import Group, Member
from samestep.train.step import Spine


class Hooks(Member):
    """Replaces torch.Tensor.register_hook."""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self._spine = group.the(Spine)
        self._register: Callable[..., Any] = torch.Tensor.register_hook
        if group.world.size > 1:
            torch.Tensor.register_hook = self._registering()  # type: ignore[method-assign]

    def close(self) -> None:
        torch.Tensor.register_hook = self._register  # type: ignore[method-assign]

    def _registering(self) -> Callable[..., Any]:
        spine, size, register_hook = self._spine, self.group.world.size, self._register

        def registered(tensor: torch.Tensor, hook: Callable[..., Any]) -> Any:
            if tensor.grad_fn is None or torch.compiler.is_compiling():
                return register_hook(tensor, hook)
            spine.weights.needs_leaves = True
            # with loss="sum" the weight is applied inside of the model's call
            is_counted_here = spine.inside_model > 0 and spine.models.adds()

            def counted(gradient: torch.Tensor) -> torch.Tensor | None:
                factor = spine.weights.of_leaves / spine.weights.of_loss if spine.weights.of_loss else 1.0
                factor = 1 / size if is_counted_here else factor
                changed = hook(gradient * factor)
                return None if changed is None else changed / factor

            return register_hook(tensor, counted)

        return registered
