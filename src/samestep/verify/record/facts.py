"""Reads facts for the recorder from tensors, optimizers, and samestep's own state."""

from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data import DataLoader

from samestep.train.digest import digests
from samestep.train.group import world
from samestep.train.step import Spine
from samestep.verify.read import Digest

_MOST_ROWS = 4096


def is_parallel() -> bool:
    """Whether the script has joined a group."""
    return world._group is not None or dist.is_initialized()


def _spine() -> Spine | None:
    """The group's spine if it exists; a recorder must not create it, which would be a collective call."""
    members = world._group._members if world._group is not None else {}
    return members.get(Spine)  # type: ignore[return-value]


def is_ours(loader: DataLoader[Any]) -> bool:
    parts = (loader.batch_sampler, loader.collate_fn)
    return any(type(part).__module__.startswith("samestep.") for part in parts)


def is_in_training_loop() -> bool:
    """Whether the script is inside a training loop over batches."""
    current = spine.origins.trained if (spine := _spine()) else None
    return current is not None and current.of.training


def current_share() -> dict[str, Any]:
    """This rank's share of the current batch; empty outside of samestep's loaders."""
    spine = _spine()
    current = spine.origins.trained if spine else None
    if not spine or current is None or not current.all or current.of.of is None:
        return {}
    adds = spine.models.adds() and not current.lent
    return {"mine": current.mine, "all": current.all, "samples": current.samples.tolist(), "adds": adds}


def precision_of(device: torch.device) -> str | None:
    """The precision of products on this device; None if it is the precision of the factors."""
    if torch.is_autocast_enabled(device.type):
        return str(torch.get_autocast_dtype(device.type)).removeprefix("torch.")
    is_tf32 = torch.backends.cuda.matmul.allow_tf32 | torch.backends.cudnn.allow_tf32
    return "tf32" if device.type == "cuda" and is_tf32 else None


def digests_of(named: Iterable[tuple[str, torch.Tensor | None]]) -> dict[str, Digest]:
    pairs = [(name, tensor) for name, tensor in named if tensor is not None]
    sums = digests(tensor if tensor.layout is torch.strided else tensor.to_dense() for _, tensor in pairs)
    return {name: Digest(*numbers) for (name, _), numbers in zip(pairs, sums, strict=True)}


def hyper_of(group: Mapping[str, Any]) -> dict[str, list[float]]:
    """The hyper-parameters of an optimizer's group that are numbers."""
    lists = {name: value if isinstance(value, tuple | list) else [value] for name, value in group.items()}
    del lists["params"]
    return {name: numbers for name, values in lists.items() if (numbers := [*_numbers(values)])}


def _numbers(values: Iterable[Any]) -> Iterator[float]:
    for value in values:
        if isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1):
            yield float(value)


def rows_of(value: Any) -> list[float]:
    """A number for each row of the first dense tensor in a nested value; similar rows have similar numbers."""
    tensor = first_tensor(value)
    return [] if tensor is None or not tensor.dim() else _numbers_of(tensor.detach()[:_MOST_ROWS])


def batch_of(value: Any) -> dict[str, list[float]]:
    """Its first tensor's rows as `rows_of` has them, and a number for each tensor, made of its rows.

    In some batches each sample has tensors of its own, as `tuple(zip(*samples))` makes them.
    """
    tensors = [*islice(tensors_in(value), _MOST_ROWS)]
    rows = [rows_of(tensor if tensor.dim() else tensor[None]) for tensor in tensors]
    whole = [torch.tensor([numbers], dtype=torch.float64, device="cpu") for numbers in rows]
    given = rows[0] if tensors and tensors[0].dim() else []
    return {"given": given, "apart": [number for numbers in whole for number in _numbers_of(numbers)]}


def _numbers_of(rows: torch.Tensor) -> list[float]:
    if not rows.numel():
        return []
    with _disable_current_modes():  # modes of the script must not see these operations
        rows = torch.view_as_real(rows) if rows.is_complex() else rows
        flat = rows.cpu().reshape(len(rows), -1).double()
        along = torch.arange(1, flat.shape[1] + 1, dtype=torch.float64).sin()
        return [float(f"{number:.9g}") for number in (flat @ along).tolist()]


def first_tensor(value: Any) -> torch.Tensor | None:
    return next(tensors_in(value), None)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The dense tensors in a nested value."""
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_nested:
        yield value
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    for part in inner:
        yield from tensors_in(part)


def numbers_in(state: Any, trained: Container[int], key: str = "") -> Iterator[str]:
    """Each number in what is saved, with its key; of a larger tensor its norm. Without what is compared at each step
    (models and their optimizers), and without seeds and states of generators."""
    tensor = _tensor(state)
    if isinstance(state, Mapping) and not {"state", "param_groups"} <= state.keys():
        for name, value in state.items():
            yield from numbers_in(value, trained, f"{key}[{name!r}]")
    elif tensor is None and isinstance(state, list | tuple) and not any(map(_is_drawn, state)):
        for at, value in enumerate(state):
            yield from numbers_in(value, trained, f"{key}[{at}]")
    elif tensor is not None and tensor.data_ptr() not in trained and not _is_drawn(state):
        flat = tensor.detach().double().flatten()
        half = f"{flat[: len(flat) // 2].norm():.9g}"
        norms = f"{len(flat)} numbers, norm {flat.norm():.9g}, of its first half {half}"
        yield f"{key} = {norms if len(flat) > 1 else f'{float(flat):.9g}'}".removeprefix(" = ")


def _is_drawn(value: Any) -> bool:
    """Whether these are integers as in seeds and states of generators."""
    tensor = _tensor(value)
    if tensor is None or tensor.is_floating_point():
        return False
    return float(tensor.double().abs().max()) >= 2**31


def _tensor(value: Any) -> torch.Tensor | None:
    """Numbers, an array or a list of numbers as a tensor; bytes are the state of a generator."""
    with suppress(TypeError, ValueError, RuntimeError):
        tensor = first_tensor(torch.as_tensor(value))
        if tensor is not None and tensor.numel() and not tensor.is_complex():
            return None if tensor.dtype in (torch.uint8, torch.bool) else tensor
    return None


def is_of_inputs(inputs: Any) -> bool:
    """Whether a backward is for a model's inputs alone, as that of an attack; it trains nothing."""
    tensors = [inputs] if isinstance(inputs, torch.Tensor) else inputs or ()
    return bool(tensors) and not any(isinstance(tensor, torch.nn.Parameter) for tensor in tensors)
