"""Refuses runs that cannot fit into memory, and tells from the kernel's counters whether it killed a process."""

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from samestep.errors import UsageError
from samestep.files import read_text
from samestep.placement.devices import control_groups
from samestep.start.scan import imports_torch
from samestep.text import size

_GIB = 1 << 30
# The least memory of a process that has imported torch.
_OF_A_RANK = 128 << 20


def check_room(count: int, script: Path | None = None) -> None:
    """Refuse more processes with torch than fit into memory: they would stop the whole machine, not only the run."""
    # Without a script, the processes are assumed to import torch.
    memory = min(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), _limit() or sys.maxsize)
    most = max(1, memory // _OF_A_RANK)
    if count > most and (script is None or imports_torch(script)):
        raise UsageError(
            f"{count} processes that import torch need more than {size(count * _OF_A_RANK)} of memory, and this "
            f"machine has {size(memory)}; use at most {most}"
        )


def kills_for_memory() -> int | None:
    """How many processes of this control group the kernel has killed for memory; None if that is not readable."""
    return _first_number(("memory.events", "memory.oom_control"), r"^oom_kill (\d+)$")


def explain_kill(kills_before: int | None) -> str:
    """Why a process got a SIGKILL that samestep did not send, as far as the kernel tells."""
    kills, limit = kills_for_memory(), _limit()
    if kills is None or kills_before is None:
        return "killed by SIGKILL (out of memory? the kernel's count is not readable here)"
    if kills == kills_before:
        return "killed by SIGKILL, not for memory (the kernel counted no such kill)"
    return "killed by SIGKILL: out of memory" + (f" (limit {limit / _GIB:.1f} GiB)" if limit else "")


def _limit() -> int | None:
    # For "no limit", version 1 of control groups writes a longer number.
    return _first_number(("memory.max", "memory.limit_in_bytes"), r"^(\d{1,18})$")


def _first_number(names: Sequence[str], pattern: str) -> int | None:
    """The first number that the innermost control groups have in a file of version 2 or 1."""
    for group in control_groups("memory"):
        for name in names:
            if match := re.search(pattern, read_text(group / name), re.MULTILINE):
                return int(match[1])
    return None
