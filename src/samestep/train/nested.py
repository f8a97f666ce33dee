"""Replaces or lists the tensors in a nested value; the value's own types stay."""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

_DEEPEST = 6


def map_tensors(change: Callable[[Any], Any], value: Any, *, movable: bool = False) -> Any:
    """The value with change(tensor) for each tensor; with movable, objects with a method `to` are changed too."""
    if isinstance(value, torch.Tensor) or (movable and hasattr(value, "to") and not isinstance(value, type)):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(change, item, movable=movable) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(change, item, movable=movable) for item in value)
    if isinstance(value, Mapping):
        copied: Any = copy.copy(value)
        for key, item in value.items():
            copied[key] = map_tensors(change, item, movable=movable)
        return copied
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        copied = copy.copy(value)
        for field in dataclasses.fields(value):
            # setattr refuses a frozen dataclass
            object.__setattr__(
                copied, field.name, map_tensors(change, getattr(value, field.name), movable=movable)
            )
        return copied
    return value


def named_tensors(value: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in lists, tuples, dicts and plain objects, with its place in them, such as `.0.labels`."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif depth == _DEEPEST or isinstance(value, torch.nn.Module | type):
        return
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from named_tensors(item, f"{name}.{index}", depth + 1)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from named_tensors(item, f"{name}.{key}", depth + 1)
    elif hasattr(value, "__dict__"):
        yield from named_tensors(vars(value), name, depth + 1)


def memory_of(tensor: torch.Tensor) -> int:
    """A key that is equal for tensors that share their memory."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else id(tensor)
