"""Totals that are everyone's: sum, mean and gather are exact whatever each rank's share was."""

import builtins
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from samestep.errors import RanksDiffer, UsageError
from samestep.train import share
from samestep.train.meet import meet, users_line
from samestep.train.world import init

Value = TypeVar("Value")
_SMALL_BYTES = 1 << 16


def sum(value: Value) -> Value:
    """Collective. The total over all ranks of a tensor, a number, or a dict of them."""
    if init().size == 1:
        return value
    at_hand = share.current()
    weight = 0.0 if at_hand is not None and at_hand.lent else 1.0
    return _weighted("samestep.sum", value, weight, divide=False)


def mean(value: Value, weight: float | None = None) -> Value:
    """Collective. The mean over all samples of a value that is this rank's mean over its own.

    A rank counts for the samples it was given: of the batch at hand inside a loop over a loader, of the whole
    pass after it; `weight` says otherwise.
    """
    if init().size == 1:
        return value
    if weight is None:
        counted = share.counted()
        weight = 1.0 if counted is None else float(counted)
    return _weighted("samestep.mean", value, weight, divide=True)


def gather(value: Value) -> Value:
    """Collective. The ranks' tensors joined along their first dimension, their lists one after another."""
    if init().size == 1:
        return value
    leaves = list(_leaves(value))
    for leaf in leaves:
        if not isinstance(leaf, list | tuple) and not (isinstance(leaf, torch.Tensor) and leaf.dim()):
            raise UsageError(
                f"gather joins tensors with a first dimension and lists, not {_kind(leaf)}; use [x]"
            )
    at_hand = share.current()
    if at_hand is not None and at_hand.lent:
        leaves = [leaf[:0] for leaf in leaves]
    ranks = _exchange("samestep.gather", leaves, rows=True)
    return _rebuilt(value, (_joined(leaf, [one[at] for one in ranks]) for at, leaf in enumerate(leaves)))


def _weighted(call: str, value: Value, weight: float, *, divide: bool) -> Value:
    """Ranks are added in their order, so that every rank and every run gets the same bits."""
    leaves = list(_leaves(value))
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor | int | float):
            raise UsageError(f"{call} adds tensors and numbers, not {_kind(leaf)}; gather collects lists")
        if divide and isinstance(leaf, torch.Tensor) and not (leaf.is_floating_point() or leaf.is_complex()):
            raise UsageError(
                f"samestep.mean of {_kind(leaf)} is no whole number; use .float() or samestep.sum"
            )
    small = [leaf for leaf in leaves if not _is_large(leaf)]
    ranks = _exchange(call, [weight, *small, *([*leaf.shape] for leaf in leaves if _is_large(leaf))])
    weights = [one[0] for one in ranks]
    whole = math.fsum(weights) if divide else 1.0
    columns = iter([[one[1 + at] for one in ranks] for at in range(len(small))])
    return _rebuilt(
        value,
        (
            _all_reduced(leaf, weight, whole)
            if _is_large(leaf)
            else _added(leaf, next(columns), weights, whole, divide)
            for leaf in leaves
        ),
    )


def _is_large(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.numel() * leaf.element_size() > _SMALL_BYTES


def _added(leaf: Any, column: Sequence[Any], weights: Sequence[float], whole: float, divide: bool) -> Any:
    counted = [(one, weight) for one, weight in zip(column, weights, strict=True) if weight]
    if isinstance(leaf, torch.Tensor):
        exact = leaf.dtype.is_floating_point or leaf.dtype.is_complex
        wide = torch.promote_types(leaf.dtype, torch.float64 if exact else torch.int64)
        total = torch.zeros(leaf.shape, dtype=wide)
        for one, weight in counted:
            total += one.to(wide) * weight if divide else one.to(wide)
        narrow = (total / whole if divide else total).to(leaf.dtype)
        if not exact and not torch.equal(narrow.to(wide), total):
            raise UsageError(f"samestep.sum does not fit {_kind(leaf)}; use .long()")
        return narrow.to(leaf.device)
    if not divide and isinstance(leaf, int):
        return builtins.sum(one for one, _ in counted)
    return math.fsum(one * weight for one, weight in counted) / whole if counted else math.nan


def _all_reduced(leaf: torch.Tensor, weight: float, whole: float) -> torch.Tensor:
    part = torch.zeros_like(leaf) if not weight else leaf.detach().clone()
    if weight not in (0.0, whole):
        part *= weight / whole
    dist.all_reduce(part)
    return part


def _joined(leaf: Any, parts: Sequence[Any]) -> Any:
    if isinstance(leaf, torch.Tensor):
        return torch.cat(list(parts)).to(leaf.device)
    return type(leaf)(one for part in parts for one in part)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for key in value:
            yield from _leaves(value[key])
    else:
        yield value


def _rebuilt(value: Value, leaves: Iterator[Any]) -> Value:
    if isinstance(value, Mapping):
        return cast(Value, {key: _rebuilt(value[key], leaves) for key in value})
    return cast(Value, next(leaves))


def _exchange(call: str, leaves: Sequence[Any], *, rows: bool = False) -> list[list[Any]]:
    """Every rank's leaves, by rank: numbers and lists as JSON, tensors as their bytes behind it."""
    tensors = [leaf.detach().cpu().contiguous() for leaf in leaves if isinstance(leaf, torch.Tensor)]
    try:
        head = json.dumps(
            {
                "kinds": [_kind(leaf, rows) for leaf in leaves],
                "shapes": [list(one.shape) for one in tensors],
                "plain": [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)],
            }
        ).encode()
    except TypeError as error:
        raise UsageError(f"{call} sends numbers, text and lists of them between ranks: {error}") from error
    body = b"".join(one.reshape(-1).view(torch.uint8).numpy().tobytes() for one in tensors)
    messages = meet(call, len(head).to_bytes(4, "little") + head + body)
    heads = [json.loads(one[4 : 4 + int.from_bytes(one[:4], "little")]) for one in messages]
    for rank, one in enumerate(heads):
        if one["kinds"] != heads[0]["kinds"]:
            raise RanksDiffer(_difference(call, heads[0]["kinds"], rank, one["kinds"]))
    return [
        list(
            _decoded(
                leaves, head, memoryview(bytearray(message))[4 + int.from_bytes(message[:4], "little") :]
            )
        )
        for head, message in zip(heads, messages, strict=True)
    ]


def _decoded(leaves: Sequence[Any], head: dict[str, Any], body: memoryview) -> Iterator[Any]:
    plain, shapes = iter(head["plain"]), iter(head["shapes"])
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            yield next(plain)
            continue
        shape = next(shapes)
        size = math.prod(shape) * leaf.element_size()
        flat = torch.frombuffer(body[:size], dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8)
        yield flat.view(leaf.dtype).reshape(shape)
        body = body[size:]


def _kind(leaf: Any, rows: bool = False) -> str:
    if isinstance(leaf, torch.Tensor):
        shape = ["n", *leaf.shape[1:]] if rows else list(leaf.shape)
        return f"{str(leaf.dtype).removeprefix('torch.')}[{', '.join(map(str, shape))}]"
    return type(leaf).__name__


def _difference(call: str, kinds: Sequence[str], rank: int, others: Sequence[str]) -> str:
    mine, theirs = next(
        (pair for pair in zip(kinds, others, strict=False) if pair[0] != pair[1]),
        (f"{len(kinds)} values", f"{len(others)} values"),
    )
    return (
        f"{call} ({users_line()}) got {mine} on rank 0 and {theirs} on rank {rank}; "
        "bring the same kind and shape on every rank"
    )
