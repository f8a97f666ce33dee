"""A model on this rank whose forward goes through torch's DistributedDataParallel, weighed by its share."""

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
from samestep.train.draws import Draws
from samestep.train.group.group import Group
from samestep.train.model.alike import check_alike
from samestep.train.model.batchnorm import BATCH_NORMS, Synced, has_only_their_buffers
from samestep.train.model.exchange import average, broadcast, hooks_on, record_buckets
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
from samestep.train.step import Share, Spine

_BUFFER_OPTIONS = ("forward_sync_buffers", "broadcast_buffers")  # torch 2.11 has only the latter
_PATCHED = ("forward", "__getstate__")


class Replica:
    """Stands in the model's `forward`; everything else of the model is as it was."""

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
        """`sums`: the loss is a sum over samples, and no mean; `tree`: what adds the gradients instead of DDP."""
        self.number, self.model, self.sums, self.tree = number, model, sums, tree
        self.own_forward = model.forward
        self.patched_over = {name: model.__dict__[name] for name in _PATCHED if name in model.__dict__}
        self.dirty = False
        self.ddp: DistributedDataParallel | None = None
        self._group, self._spine, self._draws = group, group.the(Spine), group.the(Draws)
        self._looked_at = self._drops_gradients = False
        self._hooks: list[RemovableHandle] = []
        # a later model may have the same parameters
        weakref.finalize(self, _remove, self._hooks).atexit = False
        self.hooked: list[torch.nn.Parameter] = []
        # DDP's exchange: "due" in the next backward, "under way" in this one, "missed" by one that has begun
        self._exchange = ""
        self._called_at = -1
        self._seen_since: set[int] = set()
        self.moves_buffers = False
        self._options = options
        if group.world.size > 1 and tree is None:
            self._wrap()
        elif group.world.size > 1:
            broadcast((*model.parameters(), *model.buffers()))
        model.__dict__["forward"] = self
        model.__dict__["__getstate__"] = partial(_plain_state, model)

    def _wrap(self) -> None:
        """Collective. Have DDP exchange the gradients of the parameters that are trained now."""
        options, trained = self._options, self._trained()
        self._parameters = list(self.model.parameters())
        self._of_ddp = [parameter.requires_grad for parameter in self._parameters]
        has_buffers = next(self.model.buffers(), None) is not None
        self.moves_buffers = has_buffers and not options.keys() & set(_BUFFER_OPTIONS)
        # BatchNorm reads its buffers in evaluation alone, so they can be sent later than in every forward
        late = {_buffer_option(): False} if self.moves_buffers and has_only_their_buffers(self.model) else {}
        body = _Body(self.model, self.own_forward)
        self.ddp = DistributedDataParallel(body, **{"gradient_as_bucket_view": True, **late, **options})
        if "SAMESTEP_RECORD_BUCKETS" in os.environ:
            record_buckets(self.ddp)
        for parameter in trained[:1] + trained[1:][-1:]:
            expect = _weakly(self._expect_call)
            self._hooks.append(parameter.register_post_accumulate_grad_hook(expect))  # type: ignore[no-untyped-call]

    def follow_parameters(self) -> None:
        """Collective where parameters were added, frozen or unfrozen: DDP knows only those trained when it was made.

        A model that is frozen as a whole, as a GAN's discriminator in turns, has nothing to exchange.
        """
        if self.ddp is None or not self._trained():
            return
        self.hooked = [one for one in self._trained() if any(hooks_on(one, self.own_hooks))]
        found = list(self.model.parameters())
        is_as_before = list(map(id, found)) == list(map(id, self._parameters))
        if is_as_before and [parameter.requires_grad for parameter in found] == self._of_ddp:
            return
        check_alike(self.model, self._group)
        # until DDP's reducer is gone, it would exchange gradients of backwards that are not its own
        del self.ddp.logger, self.ddp.reducer
        self._remove_hooks()
        self._wrap()

    @property
    def own_hooks(self) -> set[int]:
        """The numbers of the hooks that are not the script's."""
        return {handle.id for handle in self._hooks}

    def _remove_hooks(self) -> None:
        _remove(self._hooks)
        self._drops_gradients = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        share = self._spine.share_of(args, kwargs)
        if self._draws.active:
            batch = self._spine.batch_of(args, kwargs)
            with self._spine.working_on(batch), self._draws.watching.model_called(self.model, args, kwargs):
                return self._called(share, args, kwargs)
        return self._called(share, args, kwargs)

    def _called(self, share: Share | None, args: Any, kwargs: Any) -> Any:
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
        self._seen_since.clear()
        if self._exchange == "missed":
            self._exchange = ""
        if self.ddp and [parameter.requires_grad for parameter in self._parameters] != self._of_ddp:
            self.follow_parameters()
        with self._group.within("forward"):
            output = self._weighed(share, args, kwargs)
        if not self._looked_at and (share is None or share.microbatch is None):
            self._looked_at = True
            refuse_opaque(output)
        return output

    def _has_microbatch(self, share: Share | None) -> bool:
        """Whether a step of microbatches is being trained on; a model in eval() mode may be trained too."""
        if not self.model.training and not (share is not None and share.of.training):
            return False
        if share is None or share.microbatch is None:
            raise UsageError(
                "replicate(exact=True) needs microbatches, and this forward pass is in none; "
                "take the training batches from samestep.steps"
            )
        return True

    def _weighed(self, share: Share | None, args: Any, kwargs: Any) -> Any:
        """The output, of which the whole batch's gradients will come; in the last microbatch of a step they do."""
        if self.tree is not None:
            assert share is not None
            return only_in(share, self._spine, self.own_forward(*args, **kwargs))
        weight = share_weight(share, self._group.world.size, sums=self.sums)
        # what is compiled multiplies by the weight itself, as a loss that is a sum does
        is_weighed_here = self.sums or torch.compiler.is_compiling()
        self._spine.called.add(1.0 if is_weighed_here else weight)
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
        if exchanges:
            on_backward(output, _weakly(self._note_backward))
        return output

    def _note_backward(self) -> None:
        """Backward has come to an output of this model; DDP exchanges in one backward after a call, and in no other."""
        self._exchange = self._exchange or "missed"

    def _expect_call(self, parameter: torch.Tensor) -> None:
        """A gradient has come; without a call of the model in this batch it would stay this rank's own."""
        again = self._called_at < 0 or id(parameter) in self._seen_since
        if again and self._called_at != self._spine.batches and self._spine.trained is not None:
            kind = type(self.model).__name__
            raise UsageError(
                f"backward() reached {kind}, which was not called in this batch, and only gradients of model(...) are "
                f"exchanged; call the model, in train() mode, or move into its forward what is computed elsewhere"
            )
        self._seen_since.add(id(parameter))
        if self._exchange == "due":
            self._exchange = "under way"
            after_backward(self._begin_to_wait)
        elif self._exchange == "missed":
            self._exchange = "under way"
            after_backward(self._exchange_again)

    def _begin_to_wait(self) -> None:
        """All gradients of this rank are there; what DDP does at the end of backward waits for the other ranks."""
        self._group.enter("exchange")
        after_backward(self._end_exchange)

    def _end_exchange(self) -> None:
        """All ranks have come; what follows, such as the script's hooks, is this rank's alone."""
        self._exchange = ""
        self._group.enter("backward")

    def _exchange_again(self) -> None:
        """Collective. A second backward through one call, or of an earlier call, has added to everyone's gradients."""
        self._exchange = ""
        with self._group.waiting(f"the gradients of {type(self.model).__name__}"):
            average(self._trained())

    def _trained(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def finish_exchange(self) -> None:
        """Collective where backward gave a parameter no gradient: DDP exchanges when it has one for each."""
        if self.ddp is None:
            return
        try:
            self.ddp._check_reducer_finalized()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
            if found is None:
                raise
            trained = list(itertools.compress(self._parameters, self._of_ddp))
            lacking = [trained[int(at)] for at in found[1].split()]
        else:
            return
        had_none = [parameter for parameter in lacking if parameter.grad is None]
        with torch.enable_grad():
            zeros = [*map(torch.zeros_like, lacking)]
            torch.autograd.backward([parameter.view_as(parameter) for parameter in lacking], zeros)
        for parameter in had_none:
            # where no rank has a gradient, the optimizer leaves it out, as in the serial script
            if parameter.grad is not None and not parameter.grad.any():
                parameter.grad = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Where a class copies its attributes by itself, the copy's forward is its own as well."""
        return copy.deepcopy(self.own_forward, memo)

    def settle(self) -> None:
        """Collective. Make rank 0's buffers everyone's, where training has moved them apart."""
        if self.dirty:
            self._group.all_gather("samestep.replicate's BatchNorm statistics")
            self.share_buffers()

    def share_buffers(self) -> None:
        """Collective. Rank 0's buffers, on every rank."""
        self.dirty = False
        with self._group.waiting(f"the buffers of {type(self.model).__name__}"):
            broadcast(self.model.buffers())

    @property
    def has_synced_statistics(self) -> bool:
        """Whether a BatchNorm of this model exchanges its statistics in every forward."""
        return any(isinstance(module, Synced | torch.nn.SyncBatchNorm) for module in self.model.modules())

    def own_buffers(self) -> dict[str, torch.Tensor]:
        """By name, the floating-point buffers that are not BatchNorm's."""
        return {
            f"{prefix}.{name}".lstrip("."): buffer
            for prefix, module in self.model.named_modules()
            if not isinstance(module, BATCH_NORMS)
            for name, buffer in module.named_buffers(recurse=False)
            if buffer.is_floating_point()
        }

    def equal_tensors(self) -> dict[str, torch.Tensor]:
        """By name, what has the same bits on every rank between two steps."""
        buffers = dict(self.model.named_buffers()) if self.tree is not None else {}
        return {**dict(self.model.named_parameters()), **buffers}

    def leave(self) -> None:
        """Give the model back as it was before it was replicated."""
        for name in _PATCHED:
            self.model.__dict__.pop(name, None)
        self.model.__dict__.update(self.patched_over)
        self._remove_hooks()
        self.ddp = None


def _remove(hooks: list[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()
    hooks.clear()


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """As a hook that does not keep the replica alive."""
    held = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        if found := held():
            found(*args)

    return call


def _plain_state(model: torch.nn.Module) -> Any:
    """What is copied or pickled of a replicated model is the plain model."""
    state: Any = type(model).__getstate__(model)  # type: ignore[no-untyped-call]
    if not isinstance(state, dict):
        return state
    replica = replica_of(model)
    plain = {key: value for key, value in state.items() if key not in _PATCHED}
    return plain | (replica.patched_over if replica else {})


class _Body(torch.nn.Module):
    """What DDP wraps: the model's own forward under another module, so that its hooks run once."""

    def __init__(self, model: torch.nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self.forward = forward


def replica_of(model: torch.nn.Module) -> Replica | None:
    found = getattr(model, "_orig_mod", model).__dict__.get("forward")
    return found if isinstance(found, Replica) else None


def _buffer_option() -> str:
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    return next(name for name in _BUFFER_OPTIONS if name in known)
