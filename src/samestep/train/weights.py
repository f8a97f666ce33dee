"""The factors of losses and gradients by which each rank's share of a batch counts as the part of it that it is.

Example: in a step of 5 samples, rank 1 of 2 has 2. Its mean loss counts 2 * 2 / 5 = 0.8 before gradients are averaged.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import unserializable_hook
from torch.utils.weak import WeakTensorKeyDictionary

from samestep.train.origins import Origins
from samestep.train.subscriber import Models


class Weights:
    """The factors of the running backward, and those that come from the batch at hand."""

    def __init__(self, origins: Origins, size: int) -> None:
        self._origins, self._size = origins, size
        # the running backward's factor of the loss, and the factor that gradients of leaves such as x.grad should have
        self.of_loss = self.of_leaves = 1.0
        self.needs_leaves = False  # whether the script has such leaves
        self.to_own = 1.0  # what takes a gradient of the running backward to that of this rank's loss
        self._of_leaves: Any = WeakTensorKeyDictionary()  # the hooks on leaves that are in no replica
        # of the replicas' calls since the last backward
        self.of_calls: set[float] = set()

    def of_next_loss(self, models: Models) -> float:
        """The factor of a loss where backward begins; 1.0 where the replicas' calls have different weights."""
        is_clear = models.weighs_losses and len(self.of_calls) == 1
        return next(iter(self.of_calls)) if is_clear else 1.0

    @property
    def to_leaf(self) -> float:
        """The factor that takes a gradient of the running backward to the one that a leaf should have."""
        return self.of_leaves / self.of_loss if self.of_loss else 1.0

    def begin(self, of_loss: float) -> None:
        """A backward begins from a loss with this factor."""
        self.of_loss, self.to_own = of_loss, 1.0 / of_loss if of_loss else 1.0

    def end(self) -> None:
        self.of_loss = self.of_leaves = self.to_own = 1.0

    def give_batchs(self, leaf: torch.Tensor) -> None:
        """Let a leaf such as x get its part of the whole batch's gradient: a mean divides by the whole batch."""
        if leaf not in self._of_leaves:
            self.needs_leaves = True
            self._give(leaf, lambda: self.to_leaf)

    def give_own(self, leaf: torch.Tensor) -> None:
        """Let a tensor beside the model get the gradient of this rank's loss: samestep.mean of it is the batch's."""
        self.give_replicas(leaf)
        self._give(leaf, lambda: self.to_own)

    def give_replicas(self, leaf: torch.Tensor) -> None:
        """Let a leaf that is a replica's parameter from now on get what is exchanged."""
        if hook := self._of_leaves.pop(leaf, None):
            hook.remove()

    def gives(self, leaf: torch.Tensor) -> bool:
        return leaf in self._of_leaves

    def _give(self, leaf: torch.Tensor, factor: Callable[[], float]) -> None:
        @unserializable_hook  # type: ignore[untyped-decorator]
        def weigh(gradient: torch.Tensor) -> torch.Tensor:
            return gradient * factor()

        # in a table of its own: what a tensor holds is saved with it, and its hooks are not
        self._of_leaves[leaf] = leaf.register_hook(weigh)  # type: ignore[no-untyped-call]

    def of_mean(self, models: Models) -> float:
        """The weight of this rank's mean over the batch at hand in an average over ranks."""
        share = self._origins.trained
        if models.adds():
            return float(share is None or not share.lent)
        # a batch may have been taken by next(iter(loader)) before the loop that trains on it
        return self.of_next_loss(models) if share is None else share.weight(self._size)

    def missing(self, weight: float) -> float:
        """The factor that takes a gradient of the running backward from the loss's weight to `weight`."""
        return weight / self.of_loss if weight and weight != self.of_loss else float(bool(weight))
