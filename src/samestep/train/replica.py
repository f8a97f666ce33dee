"""A model on this rank whose forward goes through torch's DistributedDataParallel, weighed by its share."""

import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from samestep.train import share
from samestep.train.meet import meet
from samestep.train.nested import map_tensors
from samestep.train.syncnorm import BATCH_NORMS
from samestep.train.world import World, at_leaving

_PATCHED = ("forward", "__reduce_ex__")
_all: "weakref.WeakSet[Replica]" = weakref.WeakSet()


class Replica:
    """Stands in the model's `forward`; everything else of the model is as it was."""

    _made = 0

    def __init__(self, model: torch.nn.Module, options: dict[str, Any], world: World) -> None:
        self._number = Replica._made
        Replica._made += 1
        self.model = model
        self.world = world
        self.own_forward = model.forward
        self.late_statistics = (
            world.size > 1 and _only_batchnorm_buffers(model) and not _names_buffers(options)
        )
        self.dirty = False
        self.ddp: DistributedDataParallel | None = None
        if world.size > 1:
            buffers = {_buffer_option(): False} if self.late_statistics else {}
            self.ddp = DistributedDataParallel(
                _Body(model, self.own_forward), **{"gradient_as_bucket_view": True, **buffers, **options}
            )
        model.__dict__["forward"] = self
        model.__dict__["__reduce_ex__"] = self._reduce
        _all.add(self)
        at_leaving(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.dirty and not self.model.training:
            self.settle()
        if not torch.is_grad_enabled():
            return self.own_forward(*args, **kwargs)
        self.dirty = self.late_statistics
        at_hand = share.current()
        if self.ddp is None:
            output = self.own_forward(*args, **kwargs)
        elif at_hand is None or at_hand.last:
            output = self.ddp(*args, **kwargs)
        else:
            with self.ddp.no_sync():
                output = self.ddp(*args, **kwargs)
        weight = share.weight(self.world.size)
        return output if weight == 1.0 else weighed(output, weight)

    def settle(self) -> None:
        """Collective. Make rank 0's BatchNorm statistics everyone's, where training has moved them apart."""
        if not self.dirty:
            return
        meet("samestep.replicate's BatchNorm statistics")
        self.dirty = False
        for buffer in self.model.buffers():
            dist.broadcast(buffer, src=0)

    def begin_step(self) -> None:
        """Called before the first microbatch of a step."""

    def end_microbatch(self, at_hand: share.Pass) -> None:
        """Called when the loop comes back from a microbatch."""

    def end_step(self, at_hand: share.Pass) -> None:
        """Called after this rank's last microbatch of a step."""

    def leave(self) -> None:
        for name in _PATCHED:
            self.model.__dict__.pop(name, None)
        self.ddp = None

    def _reduce(self, protocol: int) -> tuple[Any, ...]:
        """A copy, and what is pickled, is the plain model."""
        reduced: Any = type(self.model).__reduce_ex__(self.model, max(2, protocol))
        construct, args, state, *rest = reduced
        if isinstance(state, dict):
            state = {key: one for key, one in state.items() if key not in _PATCHED}
        return (construct, args, state, *rest)


class _Body(torch.nn.Module):
    """What DDP wraps: the model's own forward under another module, so that its hooks run once."""

    def __init__(self, model: torch.nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self.own_forward = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.own_forward(*args, **kwargs)


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


def weighed(output: Any, weight: float) -> Any:
    """The same output, whose gradient is multiplied by weight."""
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


def replicas() -> list[Replica]:
    """All replicas that live, in the order they were made, which is the same on every rank."""
    return sorted(_all, key=lambda one: one._number)


def replica_of(model: torch.nn.Module) -> Replica | None:
    found = getattr(model, "_orig_mod", model).__dict__.get("forward")
    return found if isinstance(found, Replica) else None


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
