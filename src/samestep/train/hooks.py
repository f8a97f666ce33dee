"""Hooks of the script on activations get the gradient that the serial script's get, and may change it.

On its way back a rank's gradient counts by the rank's share, so that the average over ranks is the whole batch's. A
hook that clips an activation's gradient has to see it without that. Not covered: hooks on modules, and `retain_grad`.
"""

from collections.abc import Callable
from typing import Any

import torch

from samestep.train.group.group import Group, Member
from samestep.train.step import Spine


class Hooks(Member):
    """Stands in torch.Tensor.register_hook."""

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
            spine.asks_for_leaves = True
            # the losses of a model with loss="sum" count within its call
            is_counted_here = spine.inside_model > 0 and spine.models.adds()

            def counted(gradient: torch.Tensor) -> torch.Tensor | None:
                factor = spine.leaves / spine.root if spine.root else 1.0
                factor = 1 / size if is_counted_here else factor
                changed = hook(gradient * factor)
                return None if changed is None else changed / factor

            return register_hook(tensor, counted)

        return registered
