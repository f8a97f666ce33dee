"""How many cores a process may keep busy: its affinity, and what its control groups allow."""

import os
from pathlib import Path

from samestep.files import read_text

_OWN_GROUPS = Path("/proc/self/cgroup")


def cores(pid: int = 0) -> list[int]:
    """The CPUs this process (or another) may use: its affinity, cut to the CPU quota of our control group."""
    if not hasattr(os, "sched_getaffinity"):
        return list(range(os.cpu_count() or 1))
    allowed = sorted(os.sched_getaffinity(pid))
    return allowed[: max(1, min(_quotas(), default=len(allowed)))]


def _quotas() -> list[int]:
    """How many CPUs each control group around this process lets it keep busy."""
    found = []
    for folder in control_groups("cpu"):
        quota, _, period = read_text(folder / "cpu.max").partition(" ")
        if not quota:  # version 1
            quota, period = (read_text(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        if quota.strip().isdigit():  # else there is no limit here: no such file, `max` or -1
            found.append(int(quota) // int(period))
    return found


def control_groups(controller: str) -> list[Path]:
    """The control groups around this process that may limit or count this, the innermost first."""
    folders = []
    for _, controllers, path in (line.split(":", 2) for line in read_text(_OWN_GROUPS).splitlines()):
        if not controllers or controller in controllers.split(","):
            top = Path("/sys/fs/cgroup", controllers)
            inner = top / path.lstrip("/")
            folders += [folder for folder in (inner, *inner.parents) if folder.is_relative_to(top)]
    return folders
