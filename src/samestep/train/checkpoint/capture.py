"""Lays a state with tensors out for a file without copying them, and reads it back to the CPU.

Covered: the dtypes of models, any strides, tied tensors (written once, and tied again when read).
Not covered: sparse, quantised and meta tensors and tensor subclasses; the error names their place in the state.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from samestep.errors import CheckpointError, UsageError
from samestep.state import file as state_file
from samestep.state.tree import ITEMSIZE, Blob, Packer, Path, place
from samestep.text import type_of
from samestep.train.group.group import Group

_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEMSIZE if name != "bytes"}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def pack(
    state: object, meta: Mapping[str, Any] | None = None, into: Tensor | None = None
) -> state_file.Packed:
    """Local. Lay a state out for writing: in the tensors' own memory, or copied into a flat uint8 tensor."""
    # `into` takes `Packed.bulk` bytes. Where it is pinned, copies from a device are under way until the device's stream
    # has been synchronised.
    used = 0

    def leaf(value: object, where: Path) -> tuple[Hashable, Blob, Callable[[], memoryview]] | None:
        if not isinstance(value, Tensor):
            return None
        tensor = value.detach()
        key, blob = _key(value, where)
        return key, blob, lambda: _bytes(tensor) if into is None else snapshot(tensor, blob.nbytes, into)

    def snapshot(tensor: Tensor, nbytes: int, into: Tensor) -> memoryview:
        nonlocal used
        target = into[used : used + nbytes]
        used += -(-nbytes // state_file.ALIGN) * state_file.ALIGN
        memory = target.numpy().data
        if tensor.is_cpu:
            memory[:] = _bytes(tensor)
        else:
            target.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)
        return memory

    return state_file.pack(state, meta, leaf)


def bulk(state: object) -> int:
    """Local. The bytes that `pack` needs in `into`; copies nothing, also not from a device."""

    def leaf(value: object, where: Path) -> tuple[Hashable, Blob, Callable[[], memoryview]] | None:
        return (*_key(value, where), lambda: memoryview(b"")) if isinstance(value, Tensor) else None

    packer = Packer(leaf)
    packer.node(state)
    return sum(-(-blob.nbytes // state_file.ALIGN) * state_file.ALIGN for blob in packer.blobs)


def read(file: str | os.PathLike[str] | int, dir_fd: int | None = None) -> tuple[Any, dict[str, Any]]:
    """Local. The state, each tensor in its own memory, and the meta data, after every byte was checked."""
    return state_file.read(file, _room, dir_fd=dir_fd)


def received(size: int, root: str, group: Group) -> Any:
    """Collective. On ranks other than 0: the state in the file that rank 0 hands out, which has this root digest."""
    # containers often have only 64 MB of it, for all ranks of a node together
    memory = "/dev/shm"
    fits = os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > size
    # a file without a name: nothing is left of it if this process is killed
    with tempfile.TemporaryFile(dir=memory if fits else None) as file:
        group.hand_out(file)
        file.flush()
        if state_file.peek(file.fileno()).root.hex() != root:
            raise CheckpointError(
                "the checkpoint's file was replaced while it was sent to the other ranks; start again"
            )
        return read(file.fileno())[0]


def message_of(state: object) -> bytes:
    """Local. A small state as a message; equal values give equal bytes."""
    return state_file.message_of(pack(state))


def of_message(message: bytes) -> Any:
    """Local. The state of a message, its tensors on the CPU."""
    return state_file.of_message(message, _room)


def _key(tensor: Tensor, where: Path) -> tuple[Hashable, Blob]:
    _refuse_foreign(tensor, where)
    # tensors with the same memory and the same view are tied, and are written once
    look = (tensor.data_ptr(), tensor.device, tensor.stride(), tensor.is_conj(), tensor.is_neg())
    blob = Blob(_NAMES[tensor.dtype], tuple(tensor.shape))
    return (look, blob) if tensor.numel() else None, blob


def _refuse_foreign(value: Tensor, where: Path) -> None:
    if type(value) not in (Tensor, Parameter):
        raise UsageError(f"{place(where)} is {type_of(value)}; give the plain tensor it stands for")
    if value.layout is not torch.strided or value.dtype not in _NAMES or value.device.type == "meta":
        kind = f"{str(value.layout).removeprefix('torch.')} {str(value.dtype).removeprefix('torch.')}"
        raise UsageError(
            f"{place(where)} is a {kind} tensor on {value.device}; give a dense one that holds values"
        )


def _bytes(tensor: Tensor) -> memoryview:
    plain = tensor.resolve_conj().resolve_neg().cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().data


def _room(blob: Blob) -> tuple[memoryview, Callable[[], object]]:
    flat = torch.empty(blob.nbytes, dtype=torch.uint8, device="cpu")
    return flat.numpy().data, lambda: flat.view(_DTYPES[blob.dtype]).view(blob.shape)
