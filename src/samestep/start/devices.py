"""What this machine offers to workers: its visible devices, and its cores in equal neighbouring shares."""

import os
import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

from samestep.errors import UsageError
from samestep.files import read_text
from samestep.placement.cores import cores


def visible_devices(env: Mapping[str, str], root: Path = Path("/")) -> list[str]:
    """The devices torch would see here, as its masking variable names them; torch itself is not asked."""
    variable, present = _present(env, root)
    mask = _mask(env, variable)
    if mask is None:
        return [str(index) for index in range(present)]
    return mask if present else []


def masked(env: Mapping[str, str], devices: str, root: Path = Path("/")) -> tuple[dict[str, str], int]:
    """The variable that leaves only these devices visible, and how many they are."""
    variable, _ = _present(env, root)
    visible = visible_devices(env, root)
    wanted = [part.strip() for part in devices.split(",")]
    if not all(re.fullmatch(r"[0-9]{1,4}", part) for part in wanted):
        raise UsageError(f"--devices {devices} is no list of numbers; write for instance --devices 0,2")
    if not visible:
        raise UsageError(
            f"--devices {devices} names devices, but none is visible here; use -n to run on cores"
        )
    for part in wanted:
        if int(part) >= len(visible):
            raise UsageError(
                f"--devices {devices} names device {part}, but {len(visible)} are visible (0 to "
                f"{len(visible) - 1}); name one of them"
            )
    chosen = [visible[int(part)] for part in wanted]
    if len(set(chosen)) < len(chosen):
        raise UsageError(f"--devices {devices} names a device twice; name each once")
    return {variable: ",".join(chosen)}, len(chosen)


def share_cores(count: int) -> tuple[list[list[int] | None], int]:
    """Each worker's own cores (None: not bound) and the number of threads that keeps all of them equal."""
    if not hasattr(os, "sched_getaffinity"):
        return [None] * count, max(1, len(cores()) // count)
    usable, allowed = cores(), os.sched_getaffinity(0)
    threads = max(1, len(usable) // count)
    # Under a quota every core may be used part of the time: picking some would crowd all containers there.
    if count == 1 or len(usable) < count or len(usable) < len(allowed):
        return [None] * count, threads
    near = sorted(usable, key=_neighbourhood)
    cuts = [len(near) * rank // count for rank in range(count + 1)]
    return [near[start:end] for start, end in pairwise(cuts)], threads


def _neighbourhood(core: int) -> tuple[int, int, int]:
    # Two hardware threads of one core are far apart by number on most machines.
    topology = Path(f"/sys/devices/system/cpu/cpu{core}/topology")
    try:
        package = int((topology / "physical_package_id").read_text())
        return package, int((topology / "core_id").read_text()), core
    except (OSError, ValueError):
        return 0, core, core


def _present(env: Mapping[str, str], root: Path) -> tuple[str, int]:
    nvidia = [*(root / "proc/driver/nvidia/gpus").glob("*")] or [*(root / "dev").glob("nvidia[0-9]*")]
    if nvidia:
        return "CUDA_VISIBLE_DEVICES", len(nvidia)
    nodes = root / "sys/class/kfd/kfd/topology/nodes"
    properties = [read_text(node) for node in nodes.glob("*/properties")]
    amd = sum(bool(re.search(r"^simd_count [1-9]", text, re.MULTILINE)) for text in properties)
    if amd:
        names = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
        return next((name for name in names if name in env), names[0]), amd
    return "ZE_AFFINITY_MASK", len(_mask(env, "ZE_AFFINITY_MASK") or [])


def _mask(env: Mapping[str, str], variable: str) -> list[str] | None:
    """The entries of a masking variable up to the first that names no device, as CUDA reads it."""
    if variable not in env:
        return None
    entries = [entry.strip() for entry in env[variable].split(",")]
    valid = [re.fullmatch(r"[0-9]+(\.[0-9]+)?|(GPU|MIG)-.+", entry) is not None for entry in entries]
    return entries[: valid.index(False)] if False in valid else entries
