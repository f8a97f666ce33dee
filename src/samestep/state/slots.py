"""Keeps a run's newest state in memory that outlives its processes: two unnamed files, of which one is complete."""

import os
from collections.abc import Mapping
from contextlib import suppress

import psutil

from samestep.errors import CheckpointError
from samestep.rundir import SLOTS
from samestep.state import file as state_file

_MOST_OF_FREE = 1 / 8


class Slots:
    """The memory that the launcher holds for rank 0; a slot holds a whole commit, with its digests and its seal."""

    def __init__(self, descriptors: list[int]) -> None:
        self._descriptors = descriptors  # the first is written next

    def fit(self, num_bytes: int) -> bool:
        """Whether there is enough free memory to keep two states of this size."""
        free: int = psutil.virtual_memory().available
        return len(self._descriptors) * num_bytes <= _MOST_OF_FREE * free

    def write(self, packed: state_file.Packed, seal: state_file.Seal) -> None:
        """Write this state; until it is complete, the other slot holds the newest state."""
        descriptor = self._descriptors[0]
        os.ftruncate(descriptor, 0)
        state_file.write(descriptor, packed, seal)
        self._descriptors.reverse()

    def following(self, run: bytes, after: tuple[int, bytes]) -> list[tuple[int, state_file.Outline]]:
        """The slots whose seals follow this commit of this run, the newest first, with their outlines."""
        slots = []
        for descriptor in self._descriptors:
            with suppress(CheckpointError):
                outline = state_file.peek(descriptor)
                seal = outline.seal
                if (seal.run, seal.number, seal.previous) == (run, after[0] + 1, after[1]):
                    slots.append((descriptor, outline))
        return sorted(slots, key=lambda slot: slot[1].seal.step, reverse=True)

    def keep(self, good: int | None) -> None:
        """Empty all slots except the slot `good`, which was read and is good."""
        self._descriptors.sort(key=lambda descriptor: descriptor == good)
        for descriptor in self._descriptors:
            if descriptor != good:
                os.ftruncate(descriptor, 0)


def slots_of(env: Mapping[str, str]) -> Slots | None:
    """The slots that this process got from its launcher; None if it got none."""
    if not all(env.get(name, "").isdecimal() for name in SLOTS):
        return None
    descriptors = [int(env[name]) for name in SLOTS]
    for descriptor in descriptors:
        # a child process inherits the variable, but there the number may belong to another file
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"/memfd:{SLOTS[0]} "):
                os.set_inheritable(descriptor, False)
                continue
        return None
    return Slots(descriptors)
