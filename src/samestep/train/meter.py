"""Counts the training steps of this process and tells those outside, at the price of a store to memory."""

import os

from samestep.rundir import Pulse, pulse_of
from samestep.train.group.group import Group, Member
from samestep.train.step import Share, Spine, Subscriber


class Meter(Member, Subscriber):
    """Writes the pulse of this process, from its first training step on."""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self._pulse: Pulse | None = None
        self._begun = False
        self._resumed = 0

    def count_on_from(self, steps: int) -> None:
        """Count the steps of a resumed run on from those it had done."""
        self._resumed = steps - self.group.the(Spine).steps

    def step_begins(self, share: Share) -> None:
        if not share.of.training:
            return
        if not self._begun:
            self._begun = True
            world = self.group.world
            path = pulse_of(os.environ, world.rank)
            self._pulse = Pulse(path, str(world.device)) if path else None
        if self._pulse:
            self._pulse.beat(self._resumed + share.step + 1, share.of.epoch)
