"""Which weights stay equal: after backward() every rank holds the gradient of the whole batch's mean loss.

Covered: torch's DistributedDataParallel does the exchange; the model keeps its class, attributes and keys.
Not covered: a loss that reaches parameters without passing through the model's outputs (a penalty kept on the
module, say) is averaged over ranks, not over samples; parameters whose `requires_grad` changes afterwards.
"""

import hashlib
import inspect
import json
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from samestep.errors import RanksDiffer, UsageError
from samestep.train import share
from samestep.train.meet import meet
from samestep.train.nested import map_tensors
from samestep.train.syncnorm import BATCH_NORMS, Synced, convert
from samestep.train.world import World, at_leaving, init

Model = TypeVar("Model", bound=torch.nn.Module)
_replicas: "weakref.WeakSet[_Replica]" = weakref.WeakSet()


def replicate(model: Model, *, sync_batchnorm: bool = False, **ddp: Any) -> Model:
    """Collective. The same object, whose replicas on all ranks now start and stay equal.

    Options of DistributedDataParallel are passed on. From here on each rank draws its own random numbers.
    """
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"replicate got a {type(model).__name__}; pass the torch.nn.Module itself")
    if _replica_of(model) is not None or isinstance(model, DistributedDataParallel):
        raise UsageError("this model is replicated already; call replicate once, on the model itself")
    world = init()
    if world.size == 1:
        return model
    target = getattr(model, "_orig_mod", model)
    _check_device(target, world)
    _check_alike(target)
    if sync_batchnorm:
        convert(target)
    _draw_apart(world)
    if not any(one.requires_grad for one in target.parameters()):
        for tensor in (*target.parameters(), *target.buffers()):
            dist.broadcast(tensor.detach(), src=0)
        return model
    _Replica(target, ddp, world)
    return model


@contextmanager
def no_sync(model: torch.nn.Module, enabled: bool = True) -> Iterator[None]:
    """Backward passes inside add to the gradients of this rank alone; the next one outside exchanges them."""
    replica = _replica_of(model)
    if replica is None and init().size > 1:
        raise UsageError("no_sync got a model that is not replicated; pass what replicate returned")
    if replica is None or not enabled:
        yield
        return
    with replica.ddp.no_sync():
        yield


def training() -> bool:
    """Whether what runs now is a training step, as far as its replicas and autograd tell."""
    return torch.is_grad_enabled() and (
        init().size == 1 or any(one.model.training for one in list(_replicas))
    )


def settle_all() -> None:
    """Collective. Make rank 0's BatchNorm statistics everyone's, where training has moved them apart."""
    for replica in sorted(_replicas, key=lambda one: one.number):
        replica.settle()


class _Body(torch.nn.Module):
    """What DDP wraps: the model's own forward under another module, so that its hooks run once."""

    def __init__(self, model: torch.nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self.own_forward = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.own_forward(*args, **kwargs)


class _Replica:
    """Stands in the model's `forward`; everything else of the model is as it was."""

    made = 0

    def __init__(self, model: torch.nn.Module, options: dict[str, Any], world: World) -> None:
        self.number = _Replica.made
        _Replica.made += 1
        self.model = model
        self.own_forward = model.forward
        self.size = world.size
        self.late_statistics = _only_batchnorm_buffers(model) and not _names_buffers(options)
        self.dirty = False
        if self.late_statistics:
            options = {_buffer_option(): False, **options}
        if _own_statistics(model) and world.rank == 0:
            print(
                "samestep: BatchNorm takes its statistics from each rank's share alone; "
                "replicate(model, sync_batchnorm=True) takes them from the whole batch",
                file=sys.stderr,
            )
        self.ddp = DistributedDataParallel(
            _Body(model, self.own_forward), **{"gradient_as_bucket_view": True, **options}
        )
        model.__dict__["forward"] = self
        model.__dict__["__reduce_ex__"] = self._reduce
        _replicas.add(self)
        at_leaving(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.dirty and not self.model.training:
            self.settle()
        if not torch.is_grad_enabled():
            return self.own_forward(*args, **kwargs)
        self.dirty = self.late_statistics
        output = self.ddp(*args, **kwargs)
        weight = share.weight(self.size)
        return output if weight == 1.0 else _weighed(output, weight)

    def settle(self) -> None:
        if not self.dirty:
            return
        meet("samestep.replicate's BatchNorm statistics")
        self.dirty = False
        for buffer in self.model.buffers():
            dist.broadcast(buffer, src=0)

    def leave(self) -> None:
        for name in ("forward", "__reduce_ex__"):
            self.model.__dict__.pop(name, None)
        del self.ddp

    def _reduce(self, protocol: int) -> tuple[Any, ...]:
        """A copy, and what is pickled, is the plain model."""
        reduced: Any = type(self.model).__reduce_ex__(self.model, max(2, protocol))
        construct, args, state, *rest = reduced
        if isinstance(state, dict):
            state = {key: one for key, one in state.items() if key not in ("forward", "__reduce_ex__")}
        return (construct, args, state, *rest)


class _Weigh(torch.autograd.Function):
    """Identity, whose gradient counts as much as the share of the batch it was computed from."""

    @staticmethod
    def forward(ctx: Any, weight: float, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.weight = weight
        ctx.set_materialize_grads(False)
        return tuple(one.clone() for one in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if not ctx.weight:
            return (None, *(None if one is None else torch.zeros_like(one) for one in gradients))
        return (None, *(None if one is None else one * ctx.weight for one in gradients))


def _weighed(output: Any, weight: float) -> Any:
    found: dict[int, torch.Tensor] = {}

    def note(one: Any) -> Any:
        if isinstance(one, torch.Tensor) and one.requires_grad:
            found[id(one)] = one
        return one

    map_tensors(note, output)
    if not found:
        return output
    changed = dict(zip(found, _Weigh.apply(weight, *found.values()), strict=True))  # type: ignore[no-untyped-call]
    return map_tensors(lambda one: changed.get(id(one), one), output)


def _replica_of(model: torch.nn.Module) -> _Replica | None:
    found = getattr(model, "_orig_mod", model).__dict__.get("forward")
    return found if isinstance(found, _Replica) else None


def _buffer_option() -> str:
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    return "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"


def _names_buffers(options: dict[str, Any]) -> bool:
    return bool(options.keys() & {"forward_sync_buffers", "broadcast_buffers"})


def _only_batchnorm_buffers(model: torch.nn.Module) -> bool:
    return all(
        isinstance(module, BATCH_NORMS) or next(module.buffers(recurse=False), None) is None
        for module in model.modules()
    )


def _own_statistics(model: torch.nn.Module) -> bool:
    return any(
        isinstance(module, BATCH_NORMS) and not isinstance(module, torch.nn.SyncBatchNorm | Synced)
        for module in model.modules()
    )


def _check_device(model: torch.nn.Module, world: World) -> None:
    found = {one.device.type for one in model.parameters()}
    if "nccl" in dist.get_backend() and found - {world.device.type}:
        raise UsageError(
            f"replicate found parameters on {', '.join(sorted(found))} and this rank's device is "
            f"{world.device}; write replicate(model.to(device))"
        )


def _check_alike(model: torch.nn.Module) -> None:
    """DDP pairs parameters by position: another order, or a frozen one, would train wrong in silence."""
    facts = [
        (kind, name, f"{str(one.dtype).removeprefix('torch.')}{list(one.shape)}", one.requires_grad)
        for kind, named in (("parameters", model.named_parameters()), ("buffers", model.named_buffers()))
        for name, one in named
    ]
    listing = json.dumps(facts).encode()
    digests = meet("samestep.replicate", hashlib.sha256(listing).digest())
    if len(set(digests)) > 1:
        ranks = [json.loads(one) for one in meet("samestep.replicate", listing)]
        other = next(rank for rank, one in enumerate(ranks) if one != ranks[0])
        raise RanksDiffer(
            f"{_first_difference(ranks[0], other, ranks[other])}; build the same model on every rank"
        )


def _first_difference(ours: list[Any], rank: int, theirs: list[Any]) -> str:
    pairs = zip([*ours, None], [*theirs, None], strict=False)
    mine, other = next(pair for pair in pairs if pair[0] != pair[1])
    for kind in ("parameters", "buffers"):
        counts = [_count(kind, facts) for facts in (ours, theirs)]
        if counts[0] != counts[1]:
            longer, shorter = (theirs, ours) if len(theirs) > len(ours) else (ours, theirs)
            names = {fact[1] for fact in shorter}
            extra = next((fact[1] for fact in longer if fact[1] not in names), (mine or other)[1])
            return (
                f"replicate found {counts[0]} {kind} on rank 0 and {counts[1]} on rank {rank} "
                f"(first difference: {extra})"
            )
    return f"replicate found {_fact(mine)} on rank 0 and {_fact(other)} on rank {rank}"


def _count(kind: str, facts: list[Any]) -> int:
    return sum(fact[0] == kind for fact in facts)


def _fact(fact: Any) -> str:
    return f"{fact[1]} {fact[2]}{'' if fact[3] or fact[0] == 'buffers' else ' (frozen)'}"


def _draw_apart(world: World) -> None:
    """Ranks seeded alike would drop out the same units; rank 0 keeps the serial script's stream."""
    global _apart
    if world.rank and not _apart:
        seed = share.seed_of("rank", torch.initial_seed(), world.rank)
        torch.manual_seed(seed)
    _apart = True


_apart = False
