"""The conditions of equal bits: deterministic kernels, a fixed thread count, and facts that checkpoints record."""

import os
from typing import Any

import torch

from samestep.errors import UsageError
from samestep.placement.devices import CUBLAS, FIXED_CUBLAS
from samestep.train.group.device import check_cublas, name_of_hardware
from samestep.train.group.group import Group, Member
from samestep.train.passes import Share
from samestep.train.step import Spine
from samestep.train.subscriber import Subscriber

_MEMORY: Any = torch.utils.deterministic  # its one setting is a property, which type checkers do not see


class FixedArithmetic(Member, Subscriber):
    """Deterministic kernels and a fixed thread count ($SAMESTEP_EXACT_THREADS, or 1), until it is closed."""

    # In the first step torch fills new memory with NaN, which shows a script that reads memory before it writes it.

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self._before = (
            torch.are_deterministic_algorithms_enabled(),
            torch.backends.cudnn.benchmark,
            torch.get_num_threads(),
            _MEMORY.fill_uninitialized_memory,
        )
        group.the(Spine).subscribe(self)

    def fix(self) -> None:
        asked = os.environ.get("SAMESTEP_EXACT_THREADS", "1")
        if not asked.isdigit() or not int(asked):
            raise UsageError(
                f"SAMESTEP_EXACT_THREADS is {asked!r}, which is not a number of threads; use 1 or more"
            )
        if os.environ.get(CUBLAS) not in FIXED_CUBLAS:
            self.group.set_variable(CUBLAS, FIXED_CUBLAS[0])
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
        torch.set_num_threads(int(asked))
        check_cublas(self.group.world.device)

    def step_ends(self, share: Share) -> None:
        if share.of.training:
            _MEMORY.fill_uninitialized_memory = False

    def close(self) -> None:
        deterministic, torch.backends.cudnn.benchmark, threads, fills = self._before
        _MEMORY.fill_uninitialized_memory = fills
        torch.use_deterministic_algorithms(deterministic)
        torch.set_num_threads(threads)


def arithmetic() -> dict[str, Any]:
    """The facts that equal bits depend on; a change of any of them may change bits."""
    return {
        "hardware": name_of_hardware(),
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
    }
