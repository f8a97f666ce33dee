"""A model on this rank whose forward goes through torch's DistributedDataParallel, weighed by its share."""

import copy
import dataclasses
import inspect
import re
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from samestep.errors import UsageError
from samestep.train.data import share
from samestep.train.group.control import meet
from samestep.train.group.world import World, at_leaving
from samestep.train.model.batchnorm import BATCH_NORMS
from samestep.train.nested import map_tensors

_PATCHED = ("forward", "__getstate__")
_all: "weakref.WeakSet[Replica]" = weakref.WeakSet()


class Replica:
    """Stands in the model's `forward`; everything else of the model is as it was."""

    _made = 0
    any_moves_buffers = False
    _unlike_said = False

    def __init__(self, model: torch.nn.Module, options: dict[str, Any], world: World) -> None:
        self.number = Replica._made
        Replica._made += 1
        self.model = model
        self.world = world
        self.own_forward = model.forward
        self.patched_over = {name: model.__dict__[name] for name in _PATCHED if name in model.__dict__}
        self.moves_buffers = (
            world.size > 1 and next(model.buffers(), None) is not None and not _names_buffers(options)
        )
        Replica.any_moves_buffers |= self.moves_buffers
        self.dirty = False
        self._looked_at = False
        self._hooks: list[RemovableHandle] = []
        self._weighs = False
        self.ddp: DistributedDataParallel | None = None
        if world.size > 1:
            late = self.moves_buffers and _only_batchnorm_buffers(model)
            buffers = {_buffer_option(): False} if late else {}
            self.ddp = DistributedDataParallel(
                _Body(model, self.own_forward), **{"gradient_as_bucket_view": True, **buffers, **options}
            )
        self._called: tuple[share.Pass | None, int] | None = None
        self._seen_since: set[int] = set()
        if self.ddp is not None:
            self._watch_calls()
        model.__dict__["forward"] = self
        model.__dict__["__getstate__"] = partial(_plain_state, model)
        _all.add(self)
        at_leaving(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        at_hand = share.current()
        if not self.model.training:
            self.settle()
        elif torch.is_grad_enabled() or at_hand is not None:
            self.dirty = self.moves_buffers
        if not torch.is_grad_enabled():
            return self.own_forward(*args, **kwargs)
        self.note_call(at_hand)
        weight = share.weight(self.world.size)
        if at_hand is not None and at_hand.index is not None:
            return self._in_microbatch(at_hand, weight, args, kwargs)
        self._remark_unlike_shares()
        output = _weighed_call(self.exchanged, weight, args, kwargs)
        if not self._looked_at and not isinstance(output, torch.Tensor):
            self._looked_at = True
            _refuse_opaque(output)
        return output

    def _in_microbatch(self, at_hand: share.Pass, weight: float, args: Any, kwargs: Any) -> Any:
        """Weighed where gradients reach the parameters: whatever the loss is, it is a mean over the microbatch."""
        if weight != 1.0 and not self._weighs:
            self._weighs = True
            weigh = partial(_weigh_gradient, self.world.size)
            trained = [one for one in self.model.parameters() if one.requires_grad]
            self._hooks += [one.register_hook(weigh) for one in trained]  # type: ignore[no-untyped-call]
        with nullcontext() if self.ddp is None or at_hand.last else self.ddp.no_sync():
            output = self.exchanged(*args, **kwargs)
        return only_in(at_hand, output)

    def exchanged(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output, whose gradients are exchanged; DDP's errors in words of this interface."""
        if self.ddp is None:
            return self.own_forward(*args, **kwargs)
        try:
            return self.ddp(*args, **kwargs)
        except RuntimeError as error:
            if "find_unused_parameters" not in str(error):
                raise
            raise UsageError(
                f"{self._without_gradient(str(error))} of {type(self.model).__name__} got no gradient in the last "
                "step; write replicate(model, find_unused_parameters=True), or freeze what is not used"
            ) from None

    def note_call(self, at_hand: share.Pass | None) -> None:
        """The model itself is called: the gradients that follow are exchanged."""
        self._called = _batch(at_hand)
        self._seen_since.clear()

    def _watch_calls(self) -> None:
        trained = [one for one in self.model.parameters() if one.requires_grad]
        expect = partial(_expect_call, weakref.ref(self))
        for one in trained[:1] + trained[1:][-1:]:
            self._hooks.append(one.register_post_accumulate_grad_hook(expect))  # type: ignore[no-untyped-call]

    def expect_call(self, parameter: torch.Tensor) -> None:
        """A gradient has come: through a call of the model, or it stays this rank's own."""
        at_hand = share.current()
        again = self._called is None or id(parameter) in self._seen_since
        if at_hand is not None and again and self._called != _batch(at_hand):
            kind = type(self.model).__name__
            raise UsageError(
                f"a gradient of {kind} came without a call of it in this batch, and only what model(...) computes "
                f"is exchanged; call the model, in train() mode, or move what it computes elsewhere into forward"
            )
        self._seen_since.add(id(parameter))

    def _without_gradient(self, error: str) -> str:
        trained = [name for name, one in self.model.named_parameters() if one.requires_grad]
        found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", error)
        names = [trained[int(at)] for at in found[1].split()] if found else []
        return ", ".join(names[:3]) + (" and others" if len(names) > 3 else "") or "a parameter"

    def _remark_unlike_shares(self) -> None:
        if share.unlike() and self.world.rank == 0 and not self._unlike_said:
            Replica._unlike_said = True
            print(
                "samestep: two loaders are gone through at once and give this rank unlike shares of their batches; "
                "gradients count as the last one's, so let one dataset return both",
                file=sys.stderr,
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Where a class copies its attributes by itself, the copy's forward is its own as well."""
        return copy.deepcopy(self.own_forward, memo)

    def settle(self) -> None:
        """Collective. Make rank 0's buffers everyone's, where training has moved them apart."""
        if self.dirty:
            meet("samestep.replicate's BatchNorm statistics")
            self.share_buffers()

    def share_buffers(self) -> None:
        """Collective. Rank 0's buffers, on every rank."""
        self.dirty = False
        for buffer in self.model.buffers():
            broadcast(buffer)

    def equal_tensors(self) -> dict[str, torch.Tensor]:
        """By name, what has the same bits on every rank between two steps."""
        return dict(self.model.named_parameters())

    def begin_step(self) -> None:
        """Called before the first microbatch of a step."""

    def end_microbatch(self, at_hand: share.Pass) -> None:
        """Called when the loop comes back from a microbatch."""

    def end_step(self, at_hand: share.Pass) -> None:
        """Called after this rank's last microbatch of a step."""

    def leave(self) -> None:
        for name in _PATCHED:
            self.model.__dict__.pop(name, None)
        self.model.__dict__.update(self.patched_over)
        for hook in self._hooks:
            hook.remove()
        self.ddp = None


def _batch(at_hand: share.Pass | None) -> tuple[share.Pass | None, int]:
    """Which batch is being worked on, to tell it from others."""
    return at_hand, at_hand.start if at_hand else 0


def _expect_call(replica: "weakref.ref[Replica]", parameter: torch.Tensor) -> None:
    if one := replica():
        one.expect_call(parameter)


def _plain_state(model: torch.nn.Module) -> Any:
    """What is copied or pickled of a replicated model is the plain model."""
    state: Any = type(model).__getstate__(model)  # type: ignore[no-untyped-call]
    if not isinstance(state, dict):
        return state
    replica = replica_of(model)
    plain = {key: one for key, one in state.items() if key not in _PATCHED}
    return plain | (replica.patched_over if replica else {})


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
        times = _Times.apply if torch.is_grad_enabled() else _times
        return (None, *(None if one is None else times(one, ctx.weight) for one in gradients))


class _Times(torch.autograd.Function):
    """A weighed gradient in a graph of its own, such as a gradient penalty's.

    Derived again it is not weighed again: as a factor it is in whatever is derived from it.
    """

    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor, weight: float) -> torch.Tensor:
        return _times(gradient, weight)

    @staticmethod
    def backward(ctx: Any, *gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (*gradient, None)


def _times(gradient: torch.Tensor, weight: float) -> torch.Tensor:
    """What does not count is 0, also where it is no number."""
    return gradient * weight if weight else torch.zeros_like(gradient)


def _weigh_gradient(size: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
    """As a parameter's hook: what one microbatch of a step adds to it counts by that one's samples."""
    at_hand = share.current()
    if gradient is None or at_hand is None or at_hand.index is None:
        return None
    return _times(gradient, share.weight(size))


def only_in(at_hand: share.Pass, output: Any) -> Any:
    """The output, through which backward goes while its microbatch is at hand: later the weight is another's."""
    if torch.compiler.is_compiling():
        return output  # or each microbatch would be compiled anew
    start = at_hand.start

    def check(_: torch.Tensor) -> None:
        if at_hand.index is None or at_hand.start != start:
            raise UsageError(
                "backward through a microbatch came after it was left, when its weight is gone; "
                "call it inside the loop over the step's microbatches"
            )

    def watch(one: torch.Tensor) -> torch.Tensor:
        if one.requires_grad:
            one.register_hook(check)  # type: ignore[no-untyped-call]
        return one

    return map_tensors(watch, output)


def _weighed_call(
    forward: Callable[..., Any], weight: float, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """The output of forward, with the gradients of its parameters, and not of its inputs, times weight.

    So a model whose inputs are another's outputs does not weigh that one's gradients again.
    """
    if weight == 1.0:
        return forward(*args, **kwargs)
    if weight:
        args, kwargs = _weighed((args, kwargs), 1 / weight)
    with share.inside_model():
        output = forward(*args, **kwargs)
    return _weighed(output, weight)


def _weighed(value: Any, weight: float) -> Any:
    found: dict[int, torch.Tensor] = {}

    def note(one: Any) -> Any:
        if one.requires_grad:
            found[id(one)] = one
        return one

    map_tensors(note, value)
    if not found:
        return value
    changed = dict(zip(found, _Weigh.apply(weight, *found.values()), strict=True))  # type: ignore[no-untyped-call]
    return map_tensors(lambda one: changed.get(id(one), one), value)


def _refuse_opaque(output: Any) -> None:
    """Weighing would miss, in silence, the tensors of an object that only its class knows."""
    inside = vars(output).values() if hasattr(output, "__dict__") else ()
    hidden = any(isinstance(one, torch.Tensor) and one.requires_grad for one in inside)
    if hidden and not isinstance(output, Mapping | tuple | list) and not dataclasses.is_dataclass(output):
        raise UsageError(
            f"forward returned a {type(output).__name__}, in which replicate cannot weigh the tensors; "
            "return tensors, or a tuple, dict or dataclass of them"
        )


def broadcast(tensor: torch.Tensor) -> None:
    """Collective. Rank 0's values, in place, whatever the strides."""
    sent = tensor.detach().contiguous()
    dist.broadcast(sent, src=0)
    if sent.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(sent)


def replicas() -> list[Replica]:
    """All replicas that live, in the order they were made, which is the same on every rank."""
    return sorted(_all, key=lambda one: one.number)


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
