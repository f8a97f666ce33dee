"""Totals that are everyone's: sum, mean and gather are exact whatever each rank's share was.

So are their gradients: a loss over the gathered batch, or of its mean, trains as it does at one process.
"""

import builtins
import copy
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import BytesIO
from numbers import Real
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from samestep.errors import RanksDiffer, UsageError
from samestep.train import sums
from samestep.train.group.control import users_line
from samestep.train.group.device import moved, on_host
from samestep.train.group.world import joined
from samestep.train.step import spine

Value = TypeVar("Value")
_Back = Callable[[torch.Tensor], torch.Tensor]
_SMALL_BYTES = 1 << 16
_WIDE = {"c16": torch.complex128, "f8": torch.float64, "i8": torch.int64}
_NARROW = (torch.float32, torch.float64, torch.complex64, torch.complex128)


def sum(value: Value) -> Value:
    """Collective. Add a value over all ranks.

    value: a number, a tensor, or a dict of them; of the same kind and shape on every rank.

    Returns the total in the same form: integers are exact. Gradients go through it. Raises RanksDiffer if the ranks
    brought different kinds or shapes, UsageError if the value or its total cannot be represented.

        correct += (model(x).argmax(1) == y).sum().item()
        accuracy = samestep.sum(correct) / len(test.dataset)
    """
    return _weighted("samestep.sum", value, 0.0 if spine().is_lent else 1.0, divide=False)


def mean(value: Value, weight: float | None = None) -> Value:
    """Collective. The mean over the samples of all ranks; each rank brings the mean over its own samples.

    value: a float, a tensor of floats, or a dict of them; of the same kind and shape on every rank.
    weight: how much this rank counts. By default its number of samples: inside a loop over a loader, those in the
        current batch; after the loop, those of the whole pass. Inside a loop over a training loader the current
        batch is that loop's, also after an inner evaluation loop: give the weight there.

    Returns the mean in the same form. Gradients go through it. Raises what `sum` raises.

        loss = F.cross_entropy(model(x), y)
        loss.backward()
        print(samestep.mean(loss.item()))
    """
    if weight is None:
        counted = spine().counted
        weight = 1.0 if counted is None else float(counted)
    return _weighted("samestep.mean", value, weight, divide=True)


def gather(value: Value) -> Value:
    """Collective. Join the ranks' values in the order of ranks: tensors along dimension 0, lists end to end.

    value: a tensor with a first dimension, a list or a tuple, or a dict of them. Lengths may differ between ranks.

    Returns the joined value, the same on every rank; tensors stay on their device. Gradients go through it. Raises
    RanksDiffer if the ranks brought different kinds or shapes, UsageError if a value cannot be joined or sent.

        scores = samestep.gather(model(x).softmax(1))
        labels = samestep.gather(y)
        names = samestep.gather(["of", "this", "rank"])
    """
    named = dict(_leaves(value))
    for leaf in named.values():
        if not isinstance(leaf, list | tuple) and not (isinstance(leaf, torch.Tensor) and leaf.dim()):
            raise UsageError(
                f"gather joins tensors with a first dimension and lists, not {_kind(leaf)}; use [x]"
            )
    if joined().world.size == 1:
        return value
    lent = spine().is_lent
    leaves = [leaf[:0] if lent else leaf for leaf in named.values()]
    kinds = [f"{name}{_kind(leaf, rows=True)}" for name, leaf in named.items()]
    ranks = _exchange("samestep.gather", kinds, leaves)
    return _rebuilt(value, (_joined(named[name], ranks, at, lent=lent) for at, name in enumerate(named)))


def _weighted(call: str, value: Value, weight: float, *, divide: bool) -> Value:
    """Ranks are added in a fixed tree, so that every rank and every run of so many ranks gets the same bits."""
    named = dict(_leaves(value))
    leaves = list(named.values())
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor | Real):
            raise UsageError(f"{call} adds tensors and numbers, not {_kind(leaf)}; gather collects lists")
        if divide and isinstance(leaf, torch.Tensor) and not (leaf.is_floating_point() or leaf.is_complex()):
            raise UsageError(
                f"samestep.mean cannot return {_kind(leaf)}, which holds integers; use .float() or samestep.sum"
            )
    if joined().world.size == 1:
        return value
    kinds = [f"{name}{_kind(leaf)}" for name, leaf in named.items()]
    small = [leaf for leaf in leaves if not _is_large(leaf)]
    own = sums.Sums([sums.number(float(weight))], [])
    in_host = on_host([leaf for leaf in small if isinstance(leaf, torch.Tensor)])
    own.arrays.extend(_array(leaf, weight, divide) for leaf in in_host)
    for leaf in small:
        if not isinstance(leaf, torch.Tensor):
            term = None if not weight else leaf * weight if divide else leaf
            own.numbers.append(sums.number(term))
    packed, everyones = joined().total(call, json.dumps(kinds).encode(), sums.pack(own), sums.add)
    for rank, theirs in enumerate(everyones):
        if theirs != everyones[0]:
            raise RanksDiffer(_difference(call, json.loads(everyones[0]), rank, json.loads(theirs)))
    added = sums.unpack(packed)
    weights, *numbers = map(sums.value_of, added.numbers)
    whole, left, arrays = float(weights) if divide else 1.0, iter(numbers), iter(added.arrays)
    totals = (
        _all_reduced(call, leaf, weight, whole, divide)
        if _is_large(leaf)
        else _of_array(leaf, *next(arrays), whole)
        if isinstance(leaf, torch.Tensor)
        else _divided(next(left), whole)
        if divide
        else next(left)
        for leaf in leaves
    )
    part = (weight / whole if whole else math.nan) if divide else float(bool(weight))
    return _rebuilt(
        value,
        (
            _differentiable(call, leaf, total, lambda gradient: gradient * part)
            for leaf, total in zip(leaves, totals, strict=True)
        ),
    )


class _MadeByAll(torch.autograd.Function):
    """What all ranks made together: the loss of each depends on it, so a rank's gradient comes from all of them.

    Each loss counts by its rank's share, and what arrives here is weighed by this rank's once more on its way on.
    """

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, whole: torch.Tensor, call: str, back: _Back) -> torch.Tensor:
        ctx.call, ctx.back, ctx.weight = call, back, spine().weight_to_come()
        return whole.view_as(whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        own = ctx.back(_weighted(f"{ctx.call}'s gradient", gradient * ctx.weight, 1.0, divide=False))
        return (own / ctx.weight if ctx.weight else torch.zeros_like(own), None, None, None)


def _differentiable(call: str, leaf: Any, whole: Any, back: _Back) -> Any:
    if not isinstance(leaf, torch.Tensor) or not leaf.requires_grad or not torch.is_grad_enabled():
        return whole
    return _MadeByAll.apply(leaf, whole, call, back)  # type: ignore[no-untyped-call]


def _is_large(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.numel() * leaf.element_size() > _SMALL_BYTES


def _array(leaf: torch.Tensor, weight: float, divide: bool) -> tuple[str, bytes]:
    """A tensor as a term of a sum, without bytes where it does not count."""
    kind = "c16" if leaf.is_complex() else "f8" if leaf.is_floating_point() else "i8"
    if not weight:
        return kind, b""
    wide = leaf.to(_WIDE[kind])
    return kind, (wide * weight if divide else wide).contiguous().numpy().tobytes()


def _of_array(leaf: torch.Tensor, kind: str, data: bytes, whole: float) -> torch.Tensor:
    total = torch.zeros(leaf.shape, dtype=_WIDE[kind], device="cpu")
    if data:
        total += torch.frombuffer(bytearray(data), dtype=_WIDE[kind]).reshape(leaf.shape)
    return _narrowed(total / whole if whole != 1.0 else total, leaf)


def _divided(total: float, whole: float) -> float:
    return total / whole if whole else math.nan


def _all_reduced(call: str, leaf: torch.Tensor, weight: float, whole: float, divide: bool) -> torch.Tensor:
    wide = leaf.dtype if leaf.dtype in _NARROW else torch.float32 if leaf.is_floating_point() else torch.int64
    part = torch.zeros(leaf.shape, dtype=wide, device=joined().world.device)
    if weight:
        part.copy_(leaf.detach())
    if divide:
        part *= weight / whole if whole else math.nan
    with joined().waiting(call):
        dist.all_reduce(part)
    return _narrowed(part, leaf)


def _narrowed(total: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    narrow = total.to(leaf.dtype)
    if not (leaf.is_floating_point() or leaf.is_complex()) and not torch.equal(narrow.to(total.dtype), total):
        raise UsageError(f"the total of samestep.sum does not fit into {_kind(leaf)}; use .long()")
    return moved(narrow, leaf.device)


def _joined(leaf: Any, ranks: Sequence[Sequence[Any]], at: int, *, lent: bool) -> Any:
    parts = [one[at] for one in ranks]
    if not isinstance(leaf, torch.Tensor):
        return type(leaf)(one for part in parts for one in part)
    start = builtins.sum(len(part) for part in parts[: joined().world.rank])

    def back(gradient: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(leaf) if lent else gradient[start : start + len(leaf)]

    return _differentiable("samestep.gather", leaf, moved(torch.cat(parts), leaf.device), back)


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key in value:
            yield from _leaves(value[key], f"{name.removesuffix(': ')}[{key!r}]: ")
    else:
        yield name, value


def _rebuilt(value: Value, leaves: Iterator[Any]) -> Value:
    if not isinstance(value, Mapping):
        return cast(Value, next(leaves))
    new: Any = copy.copy(value)
    for key in value:
        new[key] = _rebuilt(value[key], leaves)
    return cast(Value, new)


def _written(value: Any) -> Any:
    """As JSON: what it has no form for becomes a list that begins with its type."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return ["bytes", value.hex()]
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    if type(value) in (list, tuple, set):
        return [type(value).__name__, *map(_written, value)]
    if type(value) is dict:
        return ["dict", *([_written(key), _written(one)] for key, one in value.items())]
    if isinstance(value, torch.Tensor):
        raise TypeError("a tensor in a list; use torch.stack or torch.cat")
    raise TypeError(f"a {type(value).__name__}; use numbers, text and lists, tuples or dicts of them")


def _read(node: Any) -> Any:
    if not isinstance(node, list):
        return node
    kind, *parts = node
    if kind == "bytes":
        return bytes.fromhex(parts[0])
    if kind == "complex":
        return complex(*parts)
    if kind == "dict":
        return {_read(key): _read(one) for key, one in parts}
    return {"list": list, "tuple": tuple, "set": set}[kind](map(_read, parts))


def _exchange(call: str, kinds: Sequence[str], leaves: Sequence[Any]) -> list[list[Any]]:
    """Every rank's leaves, by rank, after all were found to bring the same kinds."""
    tensors = on_host(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
    plain = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    try:
        head = json.dumps(
            [list(kinds), [list(one.shape) for one in tensors], [_written(one) for one in plain]]
        )
    except (TypeError, ValueError) as error:
        raise UsageError(f"{call} cannot send this to other ranks: {error}") from error
    packed = BytesIO()
    packed.write(head.encode() + b"\n")
    for one in tensors:
        packed.write(one.reshape(-1).view(torch.uint8).numpy().data)
    files = [BytesIO(message) for message in joined().all_gather(call, packed.getvalue())]
    heads = [json.loads(file.readline()) for file in files]
    for rank, (theirs, _, _) in enumerate(heads):
        if theirs != heads[0][0]:
            raise RanksDiffer(_difference(call, heads[0][0], rank, theirs))
    return [
        list(_decoded(leaves, shapes, [_read(one) for one in own], file))
        for (_, shapes, own), file in zip(heads, files, strict=True)
    ]


def _decoded(
    leaves: Sequence[Any], shapes: Sequence[Sequence[int]], plain: Sequence[Any], file: BytesIO
) -> Iterator[Any]:
    left = iter(shapes)
    for leaf, own in zip(leaves, plain, strict=True):
        if not isinstance(leaf, torch.Tensor):
            yield own
            continue
        shape = next(left)
        flat = torch.empty(math.prod(shape) * leaf.element_size(), dtype=torch.uint8, device="cpu")
        file.readinto(flat.numpy().data)
        yield flat.view(leaf.dtype).reshape(shape)


def _kind(leaf: Any, rows: bool = False) -> str:
    if isinstance(leaf, torch.Tensor):
        shape = ["n", *leaf.shape[1:]] if rows else list(leaf.shape)
        return f"{str(leaf.dtype).removeprefix('torch.')}[{', '.join(map(str, shape))}]"
    return "a number" if isinstance(leaf, Real) else type(leaf).__name__


def _difference(call: str, kinds: Sequence[str], rank: int, others: Sequence[str]) -> str:
    if len(kinds) != len(others):
        mine, theirs = (f"{len(one)} value{'s' * (len(one) != 1)}" for one in (kinds, others))
    else:
        mine, theirs = next(pair for pair in zip(kinds, others, strict=True) if pair[0] != pair[1])
    return (
        f"{call} ({users_line()}) got {mine} on rank 0 and {theirs} on rank {rank}; "
        "bring the same kind and shape on every rank"
    )
