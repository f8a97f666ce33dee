"""The resources of this machine: devices that a worker may open, and cores near its device."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from samestep.errors import UsageError
from samestep.files import read_text

# cuBLAS reads this variable at the first matmul; with these values it is deterministic
CUBLAS, FIXED_CUBLAS = "CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8")
COUNTED = "SAMESTEP_DEVICES"  # set by `samestep run` if it starts a process for each device
_OF_AMD = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")  # as torch reads them
_INTEL, _DISPLAYS = "0x8086", ("0x0300", "0x0380")
_ON_BOARD = ":00:02.0"
_OWN_GROUPS = Path("/proc/self/cgroup")
_JOBS = {"SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"}


class _Device(NamedTuple):
    """A device that this process may open: its PCI address and UUID, as far as they are known."""

    address: str = ""
    uuid: str = ""


def are_cores_free(env: Mapping[str, str]) -> bool:
    """Whether neither a scheduler nor devices decide how many processes belong on this machine's cores."""
    return not (_JOBS & env.keys() or visible_devices(env))


def visible_devices(env: Mapping[str, str], root: Path = Path("/")) -> list[str]:
    """The devices that torch would see, as its masking variable names them; found without torch."""
    variable, present = _present(env, root)
    mask = _mask(env, variable)
    if mask is None:
        return [str(index) for index in range(len(present))]
    return mask if present else []


def masking_variable(env: Mapping[str, str], root: Path = Path("/")) -> str:
    """The variable that hides devices of this machine's kind."""
    return _present(env, root)[0]


def masked(env: Mapping[str, str], devices: str, root: Path = Path("/")) -> tuple[dict[str, str], int]:
    """The variable that makes only these devices visible, and their number."""
    visible = visible_devices(env, root)
    wanted = [part.strip() for part in devices.split(",")]
    if not all(re.fullmatch(r"[0-9]{1,4}", part) for part in wanted):
        raise UsageError(f"--devices {devices} is not a list of numbers; write for instance --devices 0,2")
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
    return {masking_variable(env, root): ",".join(chosen)}, len(chosen)


def own_instance(env: Mapping[str, str], local_rank: int) -> dict[str, str]:
    """The mask for a process with several MIG instances: CUDA only shows a process the first of its mask."""
    mask = _mask(env, "CUDA_VISIBLE_DEVICES") or []
    if len(mask) < 2 or not all(entry.startswith("MIG-") for entry in mask) or local_rank >= len(mask):
        return {}
    return {"CUDA_VISIBLE_DEVICES": mask[local_rank]}


def cores(pid: int = 0) -> list[int]:
    """The CPUs that a process may use: its affinity, limited to the CPU quota of our control group."""
    if not hasattr(os, "sched_getaffinity"):
        return list(range(os.cpu_count() or 1))
    allowed = sorted(os.sched_getaffinity(pid))
    return allowed[: max(1, min(_quotas(), default=len(allowed)))]


def _quotas() -> list[int]:
    """The number of CPUs that each control group around this process allows."""
    quotas = []
    for folder in control_groups("cpu"):
        quota, _, period = read_text(folder / "cpu.max").partition(" ")
        if not quota:  # version 1
            quota, period = (read_text(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        if quota.strip().isdigit():  # otherwise there is no limit: no file, `max` or -1
            quotas.append(int(quota) // int(period))
    return quotas


def control_groups(controller: str) -> list[Path]:
    """The control groups around this process for this controller, the innermost first."""
    folders = []
    for _, controllers, path in (line.split(":", 2) for line in read_text(_OWN_GROUPS).splitlines()):
        if not controllers or controller in controllers.split(","):
            top = Path("/sys/fs/cgroup", controllers)
            inner = top / path.lstrip("/")
            folders += [folder for folder in (inner, *inner.parents) if folder.is_relative_to(top)]
    return folders


def share_cores(
    count: int, env: Mapping[str, str] | None = None, root: Path = Path("/")
) -> tuple[list[list[int] | None], int]:
    """Each worker's cores (None: not bound), and a number of threads that is the same for all workers."""
    # A worker's cores are near its device, if the machine tells which those are.
    if not hasattr(os, "sched_getaffinity"):
        return [None] * count, max(1, len(cores()) // count)
    usable, allowed = cores(), os.sched_getaffinity(0)
    threads = max(1, len(usable) // count)
    # Under a quota every core may be used for a part of the time: if containers picked cores, they would collide.
    if count == 1 or len(usable) < count or len(usable) < len(allowed):
        return [None] * count, threads
    near = [sorted(set(usable) & local) for local in _near_devices(os.environ if env is None else env, root)]
    shares = _cut_near(near[:count]) if len(near) >= count else None
    if shares is None:
        return [*_cut(usable, count)], threads
    return [*shares], min(map(len, shares))


def _cut(usable: Sequence[int], count: int) -> list[list[int]]:
    """Equal shares of neighbouring cores."""
    near = sorted(usable, key=_neighbourhood)
    cuts = [len(near) * rank // count for rank in range(count + 1)]
    return [near[start:end] for start, end in pairwise(cuts)]


def _cut_near(near: Sequence[Sequence[int]]) -> list[list[int]] | None:
    """Each worker's share of the cores near its device; None if a share is empty, or groups overlap."""
    groups = {tuple(local): [rank for rank, other in enumerate(near) if other == local] for local in near}
    if len({core for local in groups for core in local}) < sum(map(len, groups)):
        return None
    shares: list[list[int]] = [[] for _ in near]
    for local, ranks in groups.items():
        for rank, share in zip(ranks, _cut(local, len(ranks)), strict=True):
            shares[rank] = share
    return shares if all(shares) else None


def _neighbourhood(core: int) -> tuple[int, int, int]:
    # On most machines the numbers of a core's two hardware threads are far apart.
    topology = Path(f"/sys/devices/system/cpu/cpu{core}/topology")
    try:
        package = int((topology / "physical_package_id").read_text())
        return package, int((topology / "core_id").read_text()), core
    except (OSError, ValueError):
        return 0, core, core


def _near_devices(env: Mapping[str, str], root: Path) -> Iterator[set[int]]:
    """The cores of the NUMA node of each visible device."""
    present = _present(env, root)[1]
    for entry in visible_devices(env, root):
        if entry.isdigit():
            matching = present[int(entry) : int(entry) + 1]
        else:
            matching = [device for device in present if device.uuid and device.uuid.startswith(entry)]
        address = matching[0].address.lower() if matching else ""
        cores_near = root / "sys/bus/pci/devices" / address / "local_cpulist"
        yield _numbers(read_text(cores_near)) if address else set()


def _numbers(ranges: str) -> set[int]:
    """The numbers in a list such as `0-3,8`."""
    ends = [part.split("-") for part in ranges.strip().split(",") if part]
    return {number for end in ends for number in range(int(end[0]), int(end[-1]) + 1)}


def _present(env: Mapping[str, str], root: Path) -> tuple[str, list[_Device]]:
    """The masking variable for this machine's kind of devices, and the devices that this process may open."""
    if (root / "proc/driver/nvidia/gpus").exists() or [*(root / "dev").glob("nvidia[0-9]*")]:
        return "CUDA_VISIBLE_DEVICES", [*_of_nvidia(root)]
    if amd := [*_of_amd(root)]:
        return next((name for name in _OF_AMD if name in env), _OF_AMD[0]), amd
    named = _mask(env, "ZE_AFFINITY_MASK") or []
    return "ZE_AFFINITY_MASK", [*_of_intel(root)] or [_Device()] * len(named)


def _of_nvidia(root: Path) -> Iterator[_Device]:
    described = sorted((root / "proc/driver/nvidia/gpus").glob("*"))
    for folder in described:
        information = read_text(folder / "information")
        minor = re.search(r"^Device Minor:\s*(\d+)", information, re.MULTILINE)
        uuid = re.search(r"^GPU UUID:\s*(\S+)", information, re.MULTILINE)
        if minor is None or _opens(root / f"dev/nvidia{minor[1]}"):
            yield _Device(folder.name, uuid[1] if uuid else "")
    if not described:
        nodes = sorted((root / "dev").glob("nvidia[0-9]*"), key=lambda node: int(node.name[6:]))
        yield from (_Device() for node in nodes if _opens(node))


def _of_amd(root: Path) -> Iterator[_Device]:
    nodes = root / "sys/class/kfd/kfd/topology/nodes"
    for node in sorted(nodes.glob("*/properties"), key=lambda path: int(path.parent.name)):
        facts = dict(re.findall(r"^(\w+) (\d+)$", read_text(node), re.MULTILINE))
        minor = facts.get("drm_render_minor")
        if int(facts.get("simd_count", 0)) and (minor is None or _opens(root / f"dev/dri/renderD{minor}")):
            place = int(facts.get("location_id", 0))
            domain, bus, slot = int(facts.get("domain", 0)), place >> 8, place >> 3 & 31
            yield _Device(f"{domain:04x}:{bus:02x}:{slot:02x}.{place & 7}" if place else "")


def _of_intel(root: Path) -> Iterator[_Device]:
    """Intel's cards, without the graphics inside a processor."""
    for node in sorted((root / "sys/class/drm").glob("renderD*")):
        device = node / "device"
        address = device.resolve().name
        if read_text(device / "vendor").strip() != _INTEL or address.endswith(_ON_BOARD):
            continue
        if read_text(device / "class").startswith(_DISPLAYS) and _opens(root / "dev/dri" / node.name):
            yield _Device(address)


def _opens(path: Path) -> bool:
    """Whether this process may use the device: /proc in a container may list devices that it cannot open."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def _mask(env: Mapping[str, str], variable: str) -> list[str] | None:
    """The entries of a masking variable before the first invalid entry, as CUDA reads it."""
    if variable not in env:
        return None
    entries = [entry.strip() for entry in env[variable].split(",")]
    valid = [re.fullmatch(r"[0-9]+(\.[0-9]+)?|(GPU|MIG)-.+", entry) is not None for entry in entries]
    return entries[: valid.index(False)] if False in valid else entries
