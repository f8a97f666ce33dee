"""A replicated model: forward runs through DistributedDataParallel, and gradients are weighed by shares.

Covered: models that are called several times or not at all in a step, that are frozen for a while, parameters that are
added later, hooks, copies and pickles. With `tree` the microbatches' gradients are added by Tree, without DDP.
"""

import copy
import inspect
import itertools
import os
import re
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from samestep.errors import UsageError
from samestep.train.backward import is_functional
from samestep.train.draws.draws import Draws
from samestep.train.group.group import Group
from samestep.train.model.batchnorm import BATCH_NORMS, Synced, has_only_their_buffers
from samestep.train.model.exchange import Turns, average, broadcast, check_alike, hooks_on, record_buckets
from samestep.train.model.tree import Tree
from samestep.train.model.weighing import (
    after_backward,
    drop_gradient,
    on_backward,
    only_in,
    refuse_opaque,
    share_weight,
    weighed_call,
)
from samestep.train.passes import Share
from samestep.train.step import Spine

_BUFFER_OPTIONS = ("forward_sync_buffers", "broadcast_buffers")  # torch 2.11 has only the latter
_PATCHED = ("forward", "__getstate__")


class Replica:
    """Replaces the model's `forward`, and nothing else of the model."""

    def __init__(
        self,
        number: int,
        model: torch.nn.Module,
        options: dict[str, Any],
        group: Group,
        *,
        sums: bool,
        tree: Tree | None = None,
    ) -> None:
        """`sums`: the loss is a sum over samples, not a mean; `tree`: adds the gradients instead of DDP."""
        self.number, self.model, self.sums, self.tree = number, model, sums, tree
        self.own_forward = model.forward
        self.overwritten = {name: model.__dict__[name] for name in _PATCHED if name in model.__dict__}
        self.dirty = False
        self.ddp: DistributedDataParallel | None = None
        self._group, self._spine, self._draws = group, group.the(Spine), group.the(Draws)
        self._turns = group.the(Turns)
        self._is_checked = self._drops_gradients = False
        self._hooks: list[RemovableHandle] = []
        # a later model may have the same parameters
        weakref.finalize(self, _remove, self._hooks).atexit = False
        self.hooked: list[torch.nn.Parameter] = []
        # DDP's exchange: "due" in the next backward, "under way" in this backward, "missed" by this backward
        self._exchange = ""
        self.holds_back = False  # whether the latest backward exchanged nothing, as inside no_sync
        self._called_at = -1
        self._seen_parameters: set[int] = set()
        self.moves_buffers = False
        self._options = options
        if group.world.size > 1 and tree is None:
            self._wrap()
        elif group.world.size > 1:
            broadcast((*model.parameters(), *model.buffers()))
        model.__dict__["forward"] = self
        model.__dict__["__getstate__"] = partial(_plain_state, model)

    def _wrap(self) -> None:
        """Collective. Wrap the model in DDP, which exchanges the gradients of the parameters that are trained now."""
        options, trained = self._options, self._trained()
        self._parameters = list(self.model.parameters())
        self._was_trained = [parameter.requires_grad for parameter in self._parameters]
        has_buffers = next(self.model.buffers(), None) is not None
        self.moves_buffers = has_buffers and not options.keys() & set(_BUFFER_OPTIONS)
        # BatchNorm reads its buffers only in evaluation, so DDP need not send them in every forward
        late = {_buffer_option(): False} if self.moves_buffers and has_only_their_buffers(self.model) else {}
        body = _Body(self.model, self.own_forward)
        self.ddp = DistributedDataParallel(body, **{"gradient_as_bucket_view": True, **late, **options})
        if "SAMESTEP_RECORD_BUCKETS" in os.environ:
            record_buckets(self.ddp)
        for parameter in trained[:1] + trained[1:][-1:]:
            expect = _weakly(self._expect_call)
            self._hooks.append(parameter.register_post_accumulate_grad_hook(expect))  # type: ignore[no-untyped-call]

    def follow_parameters(self) -> None:
        """Collective where parameters were added, frozen or unfrozen: wrap the model again; DDP does not follow."""
        # A model that is frozen as a whole, as a GAN's discriminator is in turns, has nothing to exchange.
        if self.ddp is None or not self._trained():
            return
        self.hooked = [parameter for parameter in self._trained() if any(hooks_on(parameter, self.own_hooks))]
        parameters = list(self.model.parameters())
        is_as_before = list(map(id, parameters)) == list(map(id, self._parameters))
        if is_as_before and [parameter.requires_grad for parameter in parameters] == self._was_trained:
            return
        check_alike(self.model, self._group)
        self._unwrap()
        self._wrap()

    def replaced(self) -> dict[str, torch.Tensor]:
        """The parameters that the script has replaced since the model was wrapped, by name."""
        now = dict(self.model.named_parameters()) if self.ddp is not None else {}
        if not now or len(now) != len(self._parameters):
            return {}
        pairs = zip(now.items(), self._parameters, strict=True)
        return {name: weight for (name, weight), before in pairs if weight is not before}

    @property
    def has_trained(self) -> bool:
        return self._called_at >= 0

    @property
    def own_hooks(self) -> set[int]:
        """The ids of the hooks that this replica has registered."""
        return {handle.id for handle in self._hooks}

    def _unwrap(self) -> None:
        if self.ddp is not None:
            # the reducer's hooks would exchange gradients too, until it is freed
            del self.ddp.logger, self.ddp.reducer
        self.ddp, self._drops_gradients = None, False
        _remove(self._hooks)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        share = self._spine.origins.share_of(args, kwargs)
        if self._draws.active:
            batch = self._spine.origins.batch_of(args, kwargs)
            is_followed = not torch.compiler.is_compiling()
            called = self._draws.watching.model_called
            with (
                self._spine.origins.working_on(batch),
                called(self.model, args, kwargs) if is_followed else nullcontext(),
            ):
                return self._called(share, args, kwargs)
        return self._called(share, args, kwargs)

    def _called(self, share: Share | None, args: Any, kwargs: Any) -> Any:
        self._spine.models.part()
        if not self.model.training:
            self.settle()
        elif torch.is_grad_enabled() or share is not None:
            self.dirty = self.moves_buffers
        if self.tree is not None:
            self.tree.called = True
        if is_functional() or not torch.is_grad_enabled():
            return self.own_forward(*args, **kwargs)
        if self.tree is not None and not self._has_microbatch(share):
            return self.own_forward(*args, **kwargs)
        self._called_at = self._spine.batches
        self._seen_parameters.clear()
        if self._exchange == "missed":
            self._exchange = ""
        if self.ddp and [parameter.requires_grad for parameter in self._parameters] != self._was_trained:
            self.follow_parameters()
        with self._group.within("forward"):
            output = self._weighed(share, args, kwargs)
        if not self._is_checked and (share is None or share.microbatch is None):
            self._is_checked = True
            refuse_opaque(output)
        return output

    def _has_microbatch(self, share: Share | None) -> bool:
        """Whether this call is in a training microbatch; a model in eval() mode may be trained too."""
        if not self.model.training and not (share is not None and share.of.training):
            return False
        if share is None or share.microbatch is None:
            raise UsageError(
                "replicate(exact=True) needs microbatches, and this forward pass is in none; "
                "take the training batches from samestep.steps"
            )
        return True

    def _weighed(self, share: Share | None, args: Any, kwargs: Any) -> Any:
        """The model's output; its backward, or that of a step's last microbatch, gives the whole batch's gradients."""
        if self.tree is not None:
            assert share is not None
            return only_in(share, self._spine, self.own_forward(*args, **kwargs))
        weight = share_weight(share, self._group.world.size, sums=self.sums)
        # a compiled model, and a model with loss="sum", apply the weight in weighed_call
        is_weighed_here = self.sums or torch.compiler.is_compiling()
        self._spine.weights.of_calls.add(1.0 if is_weighed_here else weight)
        if not weight and not self._drops_gradients:
            self._drops_gradients = True
            drop = partial(drop_gradient, self._spine)
            self._hooks += [parameter.register_hook(drop) for parameter in self._trained()]  # type: ignore[no-untyped-call]
        waits = share is not None and share.microbatch is not None and not share.last
        with self.ddp.no_sync() if self.ddp and waits else nullcontext():
            output = weighed_call(self.exchanged, weight, self._spine, args, kwargs)
        return output if share is None or share.microbatch is None else only_in(share, self._spine, output)

    def exchanged(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output, whose gradients are exchanged."""
        if self.ddp is None:
            return self.own_forward(*args, **kwargs)
        exchanges = bool(self.ddp.require_backward_grad_sync)
        if exchanges:
            self._exchange = "due"
        output = self.ddp(*args, **kwargs)
        on_backward(output, _weakly(self._note_backward if exchanges else self._hold_back))
        return output

    def _hold_back(self) -> None:
        self.holds_back = True

    def _note_backward(self) -> None:
        """Backward has reached an output of this model. DDP exchanges only in the first backward after a call."""
        self._exchange = self._exchange or "missed"

    def _expect_call(self, parameter: torch.Tensor) -> None:
        """A parameter got a gradient; raise if the model was not called in this batch: DDP exchanges nothing then."""
        again = self._called_at < 0 or id(parameter) in self._seen_parameters
        if again and self._called_at != self._spine.batches and self._spine.origins.trained is not None:
            kind = type(self.model).__name__
            raise UsageError(
                f"backward() reached {kind}, which was not called in this batch, and only gradients of model(...) are "
                f"exchanged; call the model, in train() mode, or move into its forward what is computed elsewhere"
            )
        self._seen_parameters.add(id(parameter))
        if self._exchange == "due":
            self._exchange = "under way"
            after_backward(self._begin_to_wait)
        elif self._exchange == "missed":
            self._exchange = "under way"
            after_backward(self._exchange_again)

    def _begin_to_wait(self) -> None:
        """This rank has all its gradients; at the end of backward DDP waits for the other ranks."""
        self._group.enter("exchange", self._turns.take(self.number, type(self.model).__name__))
        after_backward(self._end_exchange)

    def _end_exchange(self) -> None:
        """All ranks have exchanged, unless DDP misses a gradient; the script's hooks then wait for no other rank."""
        self._exchange, self.holds_back = "", False
        if not self._missing():
            self._group.enter("backward")

    def _exchange_again(self) -> None:
        """Collective. Average gradients where DDP did not exchange, as in the second backward of a call."""
        self._exchange, self.holds_back = "", False
        with self._group.waiting(f"the gradients of {type(self.model).__name__}"):
            average(self._trained())

    def _trained(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def _missing(self) -> list[torch.nn.Parameter]:
        """The parameters for whose gradients DDP still waits, since backward gave them none."""
        if self.ddp is None:
            return []
        try:
            self.ddp._check_reducer_finalized()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            message = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
            if message is None:
                raise
            trained = list(itertools.compress(self._parameters, self._was_trained))
            return [trained[int(index)] for index in message[1].split()]
        return []

    def finish_exchange(self) -> None:
        """Collective where backward gave a parameter no gradient: DDP exchanges only when every parameter has one."""
        missing = self._missing()
        if not missing:
            return
        had_none = [parameter for parameter in missing if parameter.grad is None]
        with torch.enable_grad():
            zeros = [*map(torch.zeros_like, missing)]
            torch.autograd.backward([parameter.view_as(parameter) for parameter in missing], zeros)
        self._group.enter("backward")
        for parameter in had_none:
            # None where no rank has a gradient: the optimizer skips the parameter, as in the serial script
            if parameter.grad is not None and not parameter.grad.any():
                parameter.grad = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """For classes that copy their attributes themselves: the copy gets a plain forward."""
        return copy.deepcopy(self.own_forward, memo)

    def settle(self) -> None:
        """Collective. Copy rank 0's buffers to all ranks, if training has changed them."""
        if self.dirty:
            self._group.all_gather("samestep.replicate's BatchNorm statistics")
            self.share_buffers()

    def share_buffers(self) -> None:
        """Collective. Copy rank 0's buffers to all ranks."""
        self.dirty = False
        with self._group.waiting(f"the buffers of {type(self.model).__name__}"):
            broadcast(self.model.buffers())

    @property
    def has_synced_statistics(self) -> bool:
        """Whether a BatchNorm of this model exchanges its statistics in every forward."""
        return any(isinstance(module, Synced | torch.nn.SyncBatchNorm) for module in self.model.modules())

    def own_buffers(self) -> dict[str, torch.Tensor]:
        """The floating-point buffers that are not BatchNorm's, by name."""
        return {
            f"{prefix}.{name}".lstrip("."): buffer
            for prefix, module in self.model.named_modules()
            if not isinstance(module, BATCH_NORMS)
            for name, buffer in module.named_buffers(recurse=False)
            if buffer.is_floating_point()
        }

    def equal_tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that have the same bits on every rank between two steps, by name."""
        buffers = dict(self.model.named_buffers()) if self.tree is not None else {}
        return {**dict(self.model.named_parameters()), **buffers}

    def leave(self) -> None:
        """Make the model what it was before it was replicated."""
        for name in _PATCHED:
            self.model.__dict__.pop(name, None)
        self.model.__dict__.update(self.overwritten)
        self._unwrap()


def _remove(hooks: list[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()
    hooks.clear()


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """A hook that does not keep the replica alive."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        if target := reference():
            target(*args)

    return call


def _plain_state(model: torch.nn.Module) -> Any:
    """The state for copying and pickling a replicated model: that of the plain model."""
    state: Any = type(model).__getstate__(model)  # type: ignore[no-untyped-call]
    if not isinstance(state, dict):
        return state
    replica = replica_of(model)
    plain = {key: value for key, value in state.items() if key not in _PATCHED}
    return plain | (replica.overwritten if replica else {})


class _Body(torch.nn.Module):
    """The module that DDP wraps: it calls the model's own forward, so that the model's hooks run once."""

    def __init__(self, model: torch.nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self.forward = forward


def replica_of(model: torch.nn.Module) -> Replica | None:
    forward = getattr(model, "_orig_mod", model).__dict__.get("forward")
    return forward if isinstance(forward, Replica) else None


def _buffer_option() -> str:
    options = inspect.signature(DistributedDataParallel.__init__).parameters
    return next(name for name in _BUFFER_OPTIONS if name in options)
