"""Counts the training steps of this process and tells those outside, at the price of a store to memory."""

import os

from samestep.rundir import Pulse, pulse_of
from samestep.train.group.world import init

_pulse: Pulse | None = None
_steps = _resumed = 0


def count_on_from(steps: int) -> None:
    """Count the steps of a resumed run on from those it had done."""
    global _resumed
    _resumed = steps - _steps


def count_step(epoch: int) -> int:
    """Note that a training step begins, and say how many are done."""
    global _pulse, _steps
    if _steps == 0:
        world = init()
        path = pulse_of(os.environ, world.rank)
        _pulse = Pulse(path, str(world.device)) if path else None
    _steps += 1
    if _pulse:
        _pulse.beat(_resumed + _steps, epoch)
    return _steps - 1
