"""Whether the kernel killed a process for its memory, from what it counts; what is not readable is said."""

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from samestep.errors import UsageError
from samestep.files import read_text
from samestep.placement.cores import control_groups
from samestep.start.scan import imports_torch
from samestep.text import size

_GIB = 1 << 30
# What a process that has imported torch holds for itself, at least.
_OF_A_RANK = 128 << 20


class Kills(NamedTuple):
    """How many processes of this control group were killed for memory, and the kernel's log from here on."""

    total: int | None
    log: int | None


def check_room(count: int, script: Path | None = None) -> None:
    """Refuse more processes with torch than fit into memory: they would stop the machine, and not the run alone.

    Without a script they have torch.
    """
    have = min(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), _limit() or sys.maxsize)
    most = max(1, have // _OF_A_RANK)
    if count > most and (script is None or imports_torch(script)):
        raise UsageError(
            f"{count} processes that import torch need more than {size(count * _OF_A_RANK)} of memory, and this "
            f"machine has {size(have)}; use at most {most}"
        )


def watch_kills() -> Kills:
    """Look now, to compare later."""
    try:
        log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
        os.lseek(log, 0, os.SEEK_END)
    except OSError:
        log = None
    return Kills(_count(), log)


def explain_kill(pid: int, before: Kills) -> str:
    """Why a process got a SIGKILL that samestep did not send, as far as the kernel tells."""
    record, after = _record(pid, before.log), _count()
    is_counted = after is not None and before.total is not None
    if record or (is_counted and after != before.total):
        held = re.search(r"anon-rss:(\d+)kB", record or "")
        amount = f", it held {int(held[1]) * 1024 / _GIB:.1f} GiB" if held else ""
        limit = _limit()
        return f"killed by SIGKILL: out of memory{amount}" + (
            f" (limit {limit / _GIB:.1f} GiB)" if limit else ""
        )
    if is_counted:
        return "killed by SIGKILL, not for memory (the kernel counted no such kill)"
    return "killed by SIGKILL (out of memory? the kernel's count is not readable here)"


def _record(pid: int, log: int | None) -> str | None:
    """The kernel's own words about killing this process."""
    while log is not None:
        try:
            text = os.read(log, 8192).decode(errors="replace")
        except BrokenPipeError:
            continue  # records were overwritten before they were read
        except OSError:
            return None
        if f"Killed process {pid} " in text:
            return text
        if not text:  # a container may have /dev/null in its place
            return None
    return None


def _count() -> int | None:
    return _first_number(("memory.events", "memory.oom_control"), r"^oom_kill (\d+)$")


def _limit() -> int | None:
    # Version 1 writes a longer number for no limit.
    return _first_number(("memory.max", "memory.limit_in_bytes"), r"^(\d{1,18})$")


def _first_number(names: Sequence[str], pattern: str) -> int | None:
    """The first number that our innermost control groups tell in a file of version 2 or 1."""
    for group in control_groups("memory"):
        for name in names:
            if found := re.search(pattern, read_text(group / name), re.MULTILINE):
                return int(found[1])
    return None
