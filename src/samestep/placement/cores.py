"""How many cores a process may keep busy: its affinity, and what its control groups allow."""

import os
from pathlib import Path


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
        try:
            if (folder / "cpu.max").exists():
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            if int(quota) > 0:
                found.append(int(quota) // int(period))
        except (OSError, ValueError):  # no limit here: no such file, or `max`
            continue
    return found


def control_groups(controller: str) -> list[Path]:
    """The control groups around this process that may limit or count this, the innermost first."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    folders = []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if not controllers or controller in controllers.split(","):
            top = Path("/sys/fs/cgroup", controllers)
            inner = top / path.lstrip("/")
            folders += [folder for folder in (inner, *inner.parents) if folder.is_relative_to(top)]
    return folders
