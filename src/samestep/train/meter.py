"""Counts the training steps of this process and tells those outside, at the price of a store to memory."""

from samestep.train.group.group import Group, Member
from samestep.train.step import Share, Spine, Subscriber


class Meter(Member, Subscriber):
    """Writes the pulse of this process, from its first training step on."""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self._resumed = 0

    def count_on_from(self, steps: int) -> None:
        """Count the steps of a resumed run on from those it had done."""
        self._resumed = steps - self.group.the(Spine).steps

    def step_begins(self, share: Share) -> None:
        if share.of.training and self.group.pulse is not None:
            self.group.pulse.beat(self._resumed + share.step + 1, share.of.epoch)
