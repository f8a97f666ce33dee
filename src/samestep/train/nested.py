"""Applies a function to every tensor in a nested value and keeps the value's own types."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch


def map_tensors(change: Callable[[Any], Any], value: Any) -> Any:
    """The value with change(tensor) for each tensor; an object that moves itself (`.to`) counts as one."""
    if isinstance(value, torch.Tensor) or (hasattr(value, "to") and not isinstance(value, type)):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(change, one) for one in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(change, one) for one in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            one.name: map_tensors(change, getattr(value, one.name)) for one in dataclasses.fields(value)
        }
        return dataclasses.replace(value, **fields)
    if isinstance(value, Mapping):
        pairs = {key: map_tensors(change, one) for key, one in value.items()}
        return pairs if type(value) is dict else type(value)(pairs)  # type: ignore[call-arg]
    return value
