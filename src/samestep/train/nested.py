"""Applies a function to every tensor in a nested value and keeps the value's own types."""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch


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
