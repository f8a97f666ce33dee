"""The factors of losses and gradients by which each rank's share of a batch counts as the part of it that it is.

Example: in a step of 5 samples, rank 1 of 2 has 2. Its mean loss counts 2 * 2 / 5 = 0.8 before gradients are averaged.
"""

from samestep.train.origins import Origins
from samestep.train.subscriber import Models


class Weights:
    """The factors of the running backward, and those that come from the batch at hand."""

    def __init__(self, origins: Origins, size: int) -> None:
        self._origins, self._size = origins, size
        # the running backward's factor of the loss, and the factor that gradients of leaves such as x.grad should have
        self.of_loss = self.of_leaves = 1.0
        self.needs_leaves = False  # whether the script has such leaves
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

    @property
    def to_own(self) -> float:
        """The factor that takes a gradient of the running backward to that of this rank's loss."""
        return 1.0 / self.of_loss if self.of_loss else 1.0

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
