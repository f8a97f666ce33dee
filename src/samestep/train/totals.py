"""`sum`, `mean` and `gather` over all ranks, exact for any shares, and with exact gradients.

Example: rank 0 has 3 samples with mean loss 1.0, rank 1 has 2 with mean loss 2.0. `samestep.mean(loss)` is 1.4 on both.
A loss that is computed from a total or from a gathered batch trains as it does at one process.
"""

import builtins
import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from numbers import Real
from operator import itemgetter
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _disable_current_modes

from samestep.errors import RanksDiffer, UsageError
from samestep.text import counted as in_words
from samestep.train import sums
from samestep.train.group.census import pack, unpack
from samestep.train.group.control import users_line
from samestep.train.group.device import moved, on_host
from samestep.train.group.world import joined
from samestep.train.passes import cut
from samestep.train.step import spine
from samestep.train.subscriber import Subscriber

Value = TypeVar("Value")
_Back = Callable[[torch.Tensor], torch.Tensor]
_SMALL_BYTES = 1 << 16
_COUNTED = "]: a number"  # how the name and kind of a number in a dict end
_WIDE = {"c16": torch.complex128, "f8": torch.float64, "i8": torch.int64}
_NARROW = (torch.float32, torch.float64, torch.complex64, torch.complex128)


def sum(value: Value) -> Value:
    """Collective. Add a value over all ranks.

    value: a number, a tensor, a NumPy array, or a dict of them; of the same kind and shape on every rank. A key of a
    dict of numbers that a rank does not have counts as 0 there.

    Returns the total in the same form: integers are exact. Gradients go through it. Raises RanksDiffer if the ranks
    brought different kinds or shapes, UsageError if the value or its total cannot be represented.

        correct += (model(x).argmax(1) == y).sum().item()
        accuracy = samestep.sum(correct) / len(test.dataset)
    """
    _note_total("samestep.sum")
    return _weighted("samestep.sum", value, 0.0 if spine().origins.is_lent else 1.0, divide=False)


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
    _note_total("samestep.mean")
    if weight is None:
        counted = spine().origins.counted
        weight = 1.0 if counted is None else float(counted)
        if any(spine().origins.is_ambiguous(leaf) for _, leaf in _leaves(value)):
            joined().say(
                f"samestep.mean ({users_line()}) weighs each rank by its share of the training batch, but another "
                "loader was iterated since; if the value comes from that loader, write samestep.mean(value, weight=n), "
                "where n is the number of this rank's samples in it",
                what="mean",
            )
    return _weighted("samestep.mean", value, weight, divide=True)


def gather(value: Value) -> Value:
    """Collective. Join the ranks' values: tensors along dimension 0, lists end to end.

    value: a tensor or NumPy array with a first dimension, a list or a tuple, or a dict of them. Lengths may
        differ between ranks. What has a row for each sample of the current batch, or was collected over a pass that
        has ended, sample by sample or as a list of batches, comes in the order of samples, as the serial script has
        it; everything else in that of ranks.

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
                f"gather joins tensors with a first dimension and lists, not {_kind(leaf)}; {_listed(leaf)}"
            )
    if joined().world.size == 1:
        return value
    _note_total("samestep.gather")
    for leaf in named.values():
        if isinstance(leaf, torch.Tensor):
            spine().tell(Subscriber.gathered, leaf)
    lent = spine().origins.is_lent
    ranks = _of_all("samestep.gather", {name: leaf[:0] if lent else leaf for name, leaf in named.items()})
    wholes = [_joined(named[name], [parts[name] for parts in ranks], lent=lent) for name in named]
    for whole in wholes:
        if isinstance(whole, torch.Tensor):
            spine().origins.note_joined(whole)
    return _rebuilt(value, iter(wholes))


def _note_total(call: str) -> None:
    """Count the total; remark where it may contain lent samples of a training loop, which other ranks count too."""
    spine().totals += 1
    spine().leave_loop_of_next()
    size, left = joined().world.size, spine().origins.evaluated
    if spine().origins.at_hand is not None or left is None or not left.training or size == 1:
        return
    if getattr(left.of, "is_share_read", False):
        return  # the loop weighs what it adds up, and a rank without a sample has the weight 0
    for lent in [samples for samples, _ in left.sizes if samples < size]:
        joined().say(
            f"{call} ({users_line()}) counts samples twice if it adds up what the loop computed of a batch of "
            f"{in_words(lent, 'sample')} for {size} ranks, because a rank without a sample gets those of others; "
            f"call {call} inside the loop, or write drop_last=True"
        )


def _places(parts: Sequence[Any]) -> list[list[int]] | None:
    """For each rank the positions of its rows in the pass, if they were collected over a whole pass; else None."""
    evaluated, batch = spine().origins.evaluated, spine().origins.at_hand
    size, counts = len(parts), [len(part) for part in parts]
    if evaluated is None or (
        batch and counts == [len(range(*cut(batch.all, size, rank))) for rank in range(size)]
    ):
        return None
    places = evaluated.places(size)
    rows = [[*chain(*own)] for own in places]
    if isinstance(parts[0], list | tuple) and [*map(len, rows)] != counts:
        # a list may have an element for each batch, such as its predictions
        rows = [[batch.start for batch in own if batch] for own in places]
    return rows if [*map(len, rows)] == counts else None


def _weighted(call: str, value: Value, weight: float, *, divide: bool) -> Value:
    """The weighted sum or mean; ranks are added in a fixed tree, so that all ranks and repeated runs get equal bits."""
    named = dict(_leaves(value))
    for leaf in named.values():
        if not isinstance(leaf, torch.Tensor | Real):
            raise UsageError(f"{call} adds tensors and numbers, not {_kind(leaf)}; gather collects lists")
        if divide and isinstance(leaf, torch.Tensor) and not (leaf.is_floating_point() or leaf.is_complex()):
            raise UsageError(
                f"samestep.mean cannot return {_kind(leaf)}, which holds integers; use .float() or samestep.sum"
            )
    if joined().world.size == 1:
        return value
    tensors = [leaf for leaf in named.values() if isinstance(leaf, torch.Tensor)]
    numbers = [leaf for leaf in named.values() if not isinstance(leaf, torch.Tensor)]
    small = on_host(leaf for leaf in tensors if not _is_large(leaf))
    terms = [leaf * weight if divide else leaf for leaf in numbers] if weight else [None] * len(numbers)
    head = [[sums.number(term) for term in (float(weight), *terms)], [_kind_of_sum(leaf) for leaf in small]]
    payload = pack(head, [_array(leaf, weight, divide) for leaf in small])
    kinds = [f"{name}{_kind(leaf)}" for name, leaf in named.items()]
    packed, all_kinds = joined().total(call, kinds, payload, sums.add)
    if isinstance(value, Mapping) and not divide and _have_other_keys(all_kinds):
        return cast(Value, _weighted(call, _with_all_keys(call, value), weight, divide=False))
    _check_alike(call, all_kinds)
    (added, _), data = unpack(packed)
    weights, *totals = map(sums.value_of, added)
    whole = (float(weights) or math.nan) if divide else 1.0
    part = weight / whole if divide else float(bool(weight))
    of_numbers, of_arrays = iter(totals), iter(data)

    def total(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return next(of_numbers) / whole if divide else next(of_numbers)
        summed = (
            _all_reduced(call, leaf, part if divide else 1.0, counts=bool(weight))
            if _is_large(leaf)
            else _of_array(leaf, next(of_arrays), whole)
        )
        return _differentiable(call, leaf, summed, lambda gradient: gradient * part)

    return _rebuilt(value, map(total, named.values()))


def _have_other_keys(ranks: Sequence[Sequence[str]]) -> bool:
    """Whether all ranks brought dicts of numbers, and not all with the same keys in the same order."""
    are_flat = all(kind.endswith(_COUNTED) and "][" not in kind for kinds in ranks for kind in kinds)
    return are_flat and any(kinds != ranks[0] for kinds in ranks)


def _with_all_keys(call: str, value: Mapping[Any, Any]) -> Any:
    """Collective. A dict of numbers with the keys of every rank, in one order; those that it did not have are 0."""
    try:
        own = sums.written(list(value))
    except TypeError as error:
        own = f"{call} cannot send this key to other ranks: {error}"
    ranks = joined().all_gather(call, own)
    if wrong := [keys for keys in ranks if isinstance(keys, str)]:
        raise UsageError(wrong[0])
    keys = dict.fromkeys(key for keys in ranks for key in sums.read(keys))
    copied: Any = copy.copy(value)
    copied.clear()
    copied.update({key: value.get(key, 0) for key in keys})
    return copied


class _MadeByAll(torch.autograd.Function):
    """Identity on a total. Every rank's loss depends on it, so its gradient is the sum of all ranks' gradients."""

    # In backward each rank's gradient is brought to the weight of the rank's share, summed, and brought back.

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, whole: torch.Tensor, call: str, back: _Back) -> torch.Tensor:
        here = spine()
        weight = None if here.inside_model else here.weights.of_mean(here.models)
        ctx.call, ctx.back, ctx.weight = call, back, weight
        return whole.view_as(whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        missing = 1.0 if ctx.weight is None else spine().weights.missing(ctx.weight)
        own = ctx.back(_weighted(f"{ctx.call}'s gradient", gradient * missing, 1.0, divide=False))
        return (own / missing if missing else torch.zeros_like(own), None, None, None)


def _differentiable(call: str, leaf: Any, whole: Any, back: _Back) -> Any:
    if not isinstance(leaf, torch.Tensor) or not leaf.requires_grad or not torch.is_grad_enabled():
        return whole
    return _MadeByAll.apply(leaf, whole, call, back)  # type: ignore[no-untyped-call]


def _is_large(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.numel() * leaf.element_size() > _SMALL_BYTES


def _kind_of_sum(leaf: torch.Tensor) -> str:
    return "c16" if leaf.is_complex() else "f8" if leaf.is_floating_point() else "i8"


def _array(leaf: torch.Tensor, weight: float, divide: bool) -> bytes:
    """The bytes of a tensor as a term of a sum; no bytes with weight 0."""
    wide = leaf.to(_WIDE[_kind_of_sum(leaf)])
    return (wide * weight if divide else wide).contiguous().numpy().tobytes() if weight else b""


def _of_array(leaf: torch.Tensor, data: bytes, whole: float) -> torch.Tensor:
    total = torch.zeros(leaf.shape, dtype=_WIDE[_kind_of_sum(leaf)], device="cpu")
    if data:
        total += torch.frombuffer(bytearray(data), dtype=total.dtype).reshape(leaf.shape)
    return _narrowed(total / whole if whole != 1.0 else total, leaf)


def _all_reduced(call: str, leaf: torch.Tensor, factor: float, *, counts: bool) -> torch.Tensor:
    wide = leaf.dtype if leaf.dtype in _NARROW else torch.float32 if leaf.is_floating_point() else torch.int64
    part = torch.zeros(leaf.shape, dtype=wide, device=joined().world.device)
    if counts:
        part.copy_(leaf.detach())
    if factor != 1.0:
        part *= factor
    with joined().waiting(call):
        dist.all_reduce(part)
    return _narrowed(part, leaf)


def _narrowed(total: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    narrow = total.to(leaf.dtype)
    if not (leaf.is_floating_point() or leaf.is_complex()) and not torch.equal(narrow.to(total.dtype), total):
        raise UsageError(f"the total of samestep.sum does not fit into {_kind(leaf)}; use .long()")
    return moved(narrow, leaf.device)


def _joined(leaf: Any, parts: Sequence[Any], *, lent: bool) -> Any:
    places, rank = _places(parts), joined().world.rank
    if not isinstance(leaf, torch.Tensor):
        rows = [row for part in parts for row in part]
        if places is not None:
            rows = [row for _, row in sorted(zip(chain(*places), rows, strict=True), key=itemgetter(0))]
        return type(leaf)(rows)
    whole, start = torch.cat(list(parts)), builtins.sum(map(len, parts[:rank]))
    mine: Any = slice(start, start + len(leaf))
    if places is not None:
        index = torch.tensor([*chain(*places)], dtype=torch.int64, device="cpu")
        whole, mine = torch.empty_like(whole).index_copy_(0, index, whole), places[rank]

    def back(gradient: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(leaf) if lent else gradient[mine]

    return _differentiable("samestep.gather", leaf, moved(whole, leaf.device), back)


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key in value:
            yield from _leaves(value[key], f"{name.removesuffix(': ')}[{key!r}]: ")
    else:
        yield name, torch.tensor(value) if isinstance(value, np.ndarray) else value


def _rebuilt(value: Value, leaves: Iterator[Any]) -> Value:
    if not isinstance(value, Mapping):
        # a total is equal on all ranks and has no batch dimension to follow
        with _disable_current_modes():
            total = next(leaves)
        return cast(Value, total.numpy() if isinstance(value, np.ndarray) else total)
    copied: Any = copy.copy(value)
    for key in value:
        copied[key] = _rebuilt(value[key], leaves)
    return cast(Value, copied)


def _of_all(call: str, named: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Collective. Every rank's leaves by name; raises where ranks brought different kinds."""
    tensors = on_host(leaf for leaf in named.values() if isinstance(leaf, torch.Tensor))
    remaining = iter(tensors)
    head = []
    for name, leaf in named.items():
        is_tensor = isinstance(leaf, torch.Tensor)
        try:
            shape_or_value = list(next(remaining).shape) if is_tensor else sums.written(leaf)
        except TypeError as error:
            if isinstance(leaf, list | tuple) and any(isinstance(item, torch.Tensor) for item in leaf):
                raise UsageError(
                    f"{call} got a list of tensors; join it first, by torch.cat or torch.stack"
                ) from None
            raise UsageError(f"{call} cannot send this to other ranks: {error}") from None
        head.append([name, _kind(leaf, rows=True), shape_or_value])
    data = [tensor.reshape(-1).view(torch.uint8).numpy().data for tensor in tensors]
    ranks = [unpack(message) for message in joined().all_gather(call, pack(head, data))]
    _check_alike(call, [[name + kind for name, kind, _ in head] for head, _ in ranks])
    return [_read(named, head, iter(data)) for head, data in ranks]


def _read(named: Mapping[str, Any], head: Sequence[Any], data: Iterator[bytes]) -> dict[str, Any]:
    leaves = {}
    for name, _, shape_or_value in head:
        if isinstance(own := named[name], torch.Tensor):
            leaves[name] = tensor = torch.empty(shape_or_value, dtype=own.dtype, device="cpu")
            tensor.view(-1).view(torch.uint8).numpy().data[:] = next(data)
        else:
            leaves[name] = sums.read(shape_or_value)
    return leaves


def _listed(leaf: Any) -> str:
    """What to gather instead of a value that has no first dimension."""
    if isinstance(leaf, torch.Tensor):
        return "use x[None]"
    return "use [x]" if isinstance(leaf, Real | str | bytes | None) else "gather the tensors that it holds"


def _kind(leaf: Any, rows: bool = False) -> str:
    if isinstance(leaf, torch.Tensor):
        shape = ["n", *leaf.shape[1:]] if rows else list(leaf.shape)
        return f"{str(leaf.dtype).removeprefix('torch.')}[{', '.join(map(str, shape))}]"
    return "a number" if isinstance(leaf, Real) else type(leaf).__name__


def _check_alike(call: str, ranks: Sequence[Sequence[str]]) -> None:
    rank = next((rank for rank, kinds in enumerate(ranks) if kinds != ranks[0]), None)
    if rank is None:
        return
    pair = ranks[0], ranks[rank]
    if len(pair[0]) != len(pair[1]):
        mine, theirs = (f"{len(kinds)} value{'s' * (len(kinds) != 1)}" for kinds in pair)
    else:
        mine, theirs = next(kinds for kinds in zip(*pair, strict=True) if kinds[0] != kinds[1])
    is_padded = "[n, " in mine and "[n, " in theirs
    advice = (
        "; of rows padded to unlike lengths gather x.flatten(0, 1), or use samestep run --same" * is_padded
    )
    raise RanksDiffer(
        f"{call} ({users_line()}) got {mine} on rank 0 and {theirs} on rank {rank}; "
        f"bring the same kind and shape on every rank{advice}",
        ranks=[rank],
    )
