"""Chooses and uses this process's device; no other file of `train` names kinds of devices.

Written for every device of torch.accelerator, torch.Stream and torch.Event. Tried on CPU and on simulated streams;
docs/devices.md says what was tried where.
"""

import os
import platform
import sys
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from samestep.errors import PlacementError, UsageError
from samestep.placement.devices import COUNTED, CUBLAS, FIXED_CUBLAS, masking_variable, visible_devices
from samestep.placement.place import Placement, device_index, idle_devices
from samestep.rendezvous.member import say
from samestep.train.group.group import Group, Member

# on MPS an asynchronous copy may read memory that was freed; MPS has no process group either
_IN_ORDER = {"cpu", "mps"}


def take_device(here: Placement) -> torch.device:
    """The device of this process, chosen before any process group is made: NCCL binds to the current device."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or (accelerator.type == "mps" and here.size > 1):
        _say_unused(here)
        return torch.device("cpu")
    visible = torch.accelerator.device_count()
    index = device_index(here, visible)
    if idle := idle_devices(here, visible, sys.argv[0]):
        say(idle)
    if index is None or not overlaps(accelerator):
        return torch.device(accelerator.type)
    torch.accelerator.set_device_index(index)
    return torch.device(accelerator.type, index)


def _say_unused(here: Placement) -> None:
    """Print, or raise, if devices are visible that torch cannot use: wrong driver, or torch built for CPU only."""
    asked = os.environ.get(COUNTED)
    if not asked and (here.rank or torch.accelerator.is_available()):
        return
    count = int(asked or len(visible_devices(os.environ)))
    if not count:
        return
    # torch calls AMD's devices cuda too
    kind = "xpu" if masking_variable(os.environ) == "ZE_AFFINITY_MASK" else "cuda"
    why = f"torch.{kind} finds none"
    try:
        getattr(torch, kind).init()
    except Exception as error:
        why = str(error).strip().partition("\n")[0].rstrip(".")
    what = "1 device is visible" if count == 1 else f"{count} devices are visible"
    unused = (
        f"{what}, and torch {torch.__version__} cannot train on {'it' if count == 1 else 'them'} ({why}); "
        "install a torch for this driver"
    )
    if asked:
        raise PlacementError(f"{unused}, or write -n {count} to train on the cores")
    say(f"{unused}; this run trains on the cores")


def overlaps(device: torch.device) -> bool:
    """Whether copies to the device can overlap with the script."""
    return device.type not in _IN_ORDER


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on the device; a copy from the host does not block the script, and later kernels wait for it."""
    return tensor.to(device, non_blocking=overlaps(device) and tensor.device.type == "cpu")


def on_host(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors on the CPU, with one transfer from each device."""
    host = [tensor.detach().resolve_conj().resolve_neg().contiguous() for tensor in tensors]
    for device in {tensor.device for tensor in host} - {torch.device("cpu")}:
        # the largest elements first, so that each begins at a multiple of its size
        numbers = [number for number, tensor in enumerate(host) if tensor.device == device]
        numbers.sort(key=lambda number: -host[number].element_size())
        flat = torch.cat([host[number].reshape(-1).view(torch.uint8) for number in numbers]).cpu()
        parts = torch.split(flat, [host[number].nbytes for number in numbers])
        for number, part in zip(numbers, parts, strict=True):
            host[number] = part.view(host[number].dtype).view(host[number].shape)
    return host


def number_on_host(like: torch.Tensor) -> torch.Tensor:
    """Room for a number, to which a copy from the device does not wait."""
    return torch.empty((), dtype=like.dtype, device="cpu", pin_memory=like.device.type == "cuda")


def widest(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def has_synced_kernels(device: torch.device) -> bool:
    return device.type in ("cuda", "xpu")


class SideStreams(Member):
    """One stream for all copies of this process: the allocator keeps separate memory for every stream."""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        device = group.world.device
        self.of_copies = torch.Stream(device) if overlaps(device) else None


class HostMemory:
    """Memory that is kept for copies from a device; once it is pinned, they are fast and asynchronous."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.bytes = torch.empty(size, dtype=torch.uint8, device="cpu")
        self._is_pinned = device.type != "cuda" or not size

    def pin(self) -> None:
        """Pin the memory in place, which takes seconds for many GB; torch would round its size up to a power of two."""
        if not self._is_pinned:
            self._is_pinned = True
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            address = self.bytes.data_ptr()
            if not int(runtime.cudaHostRegister(address, len(self.bytes), 1)):
                weakref.finalize(self, runtime.cudaHostUnregister, address).atexit = False


def stream_of_device(*, in_use: bool) -> tuple[str, torch.Tensor | None]:
    """The kind of the device and its random state; with `in_use`, None if this process has not used the device."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return "", None
    module = torch.get_device_module(accelerator)
    is_in_use = not in_use or getattr(module, "is_initialized", lambda: True)()
    state = module.get_rng_state() if is_in_use and hasattr(module, "get_rng_state") else None
    return accelerator.type, state


def set_stream_of_device(kind: str, state: torch.Tensor) -> None:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and accelerator.type == kind:
        torch.get_device_module(accelerator).set_rng_state(state)


def name_of_hardware() -> str:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    module = torch.get_device_module(accelerator) if accelerator is not None else None
    named = getattr(module, "get_device_name", None)
    return str(named()) if named else _processor()


def uuid_of(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def check_cublas(device: torch.device) -> None:
    """Raise if cuBLAS was used before it was set to be deterministic."""
    if device.type != "cuda":
        return
    matrix = torch.ones(1, 1, device=device)
    try:
        matrix @ matrix
    except RuntimeError as error:
        if CUBLAS not in str(error):
            raise
        raise UsageError(
            f"a matrix was multiplied on {device} before {CUBLAS} was set to {FIXED_CUBLAS[0]}, which is too late for "
            "exact=True; call samestep.init() before anything is computed on the device"
        ) from None
