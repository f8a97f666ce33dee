"""The tensors in a nested value: changed in place of each other with the value's own types kept, or listed."""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

_DEEPEST = 6


def map_tensors(change: Callable[[Any], Any], value: Any, *, movable: bool = False) -> Any:
    """The value with change(tensor) for each tensor; with movable, an object with its own `.to` counts as one."""
    if isinstance(value, torch.Tensor) or (movable and hasattr(value, "to") and not isinstance(value, type)):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(change, one, movable=movable) for one in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(change, one, movable=movable) for one in value)
    if isinstance(value, Mapping):
        new: Any = {} if type(value) is dict else copy.copy(value)
        for key, one in value.items():
            new[key] = map_tensors(change, one, movable=movable)
        return new
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        new = copy.copy(value)
        for field in dataclasses.fields(value):
            # a frozen one allows no other way
            object.__setattr__(
                new, field.name, map_tensors(change, getattr(value, field.name), movable=movable)
            )
        return new
    return value


def named_tensors(value: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in lists, tuples, dicts and plain objects, with its place there."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif depth == _DEEPEST or isinstance(value, torch.nn.Module | type):
        return
    elif isinstance(value, list | tuple):
        for at, inner in enumerate(value):
            yield from named_tensors(inner, f"{name}.{at}", depth + 1)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from named_tensors(inner, f"{name}.{key}", depth + 1)
    elif hasattr(value, "__dict__"):
        yield from named_tensors(vars(value), name, depth + 1)


def memory_of(tensor: torch.Tensor) -> int:
    """What tells whether two tensors share their memory."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else id(tensor)
