"""Keeps a model's weights equal: after backward() every rank has the gradient of the whole batch's mean loss.

Covered: torch's DistributedDataParallel does the exchange; the model keeps its class, attributes and keys.
Not covered: a gradient that reaches parameters without passing the model's outputs is averaged over ranks and not over
samples. That is right for a penalty on weights.
"""

import gc
import inspect
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from samestep.errors import UsageError
from samestep.text import type_of
from samestep.train.draws.draws import Draws
from samestep.train.forgotten import Evaluations
from samestep.train.group.group import Group
from samestep.train.group.world import joined
from samestep.train.model.arithmetic import FixedArithmetic
from samestep.train.model.batchnorm import BATCH_NORMS, Synced, convert
from samestep.train.model.divergence import Divergence, check_every
from samestep.train.model.exchange import broadcast, check_alike
from samestep.train.model.layouts import Padding, note_layouts
from samestep.train.model.replica import Replica, replica_of
from samestep.train.model.replicas import Replicas
from samestep.train.model.tree import Tree
from samestep.train.optimizers import Optimizers

Model = TypeVar("Model", bound=torch.nn.Module)

_SYNCED = (torch.nn.SyncBatchNorm, Synced)


def replicate(
    model: Model,
    *others: Any,
    same: bool | None = None,
    exact: bool = False,
    loss: str = "mean",
    sync_batchnorm: bool | None = None,
    **ddp: Any,
) -> Model:
    """Collective. Keep a model's weights equal on all ranks: start from rank 0's, and exchange the gradients.

    The model stays the same object, with its class, attributes and state_dict keys. After backward() every rank
    holds the gradient of the mean loss over the whole batch, however unevenly the ranks share it.

    same: draw the serial script's random numbers (dropout, noise), and take BatchNorm's statistics from the whole
        batch: the numbers of one process, to rounding. Default: whether SAMESTEP_SAME=1 (`samestep run --same`).
        Without it each rank draws its own from the first batch on.
    exact: with batches from `samestep.steps`, the same bits at any number of processes. Default False.
    loss: "mean" (the default) if it is a mean over its samples; "sum" if it is a sum, or is divided by a
        count of all ranks (`loss_sum / samestep.sum(count)`): then the gradients of the ranks are added.
    sync_batchnorm: take BatchNorm's statistics from the whole batch. Default: as `same`.
    ddp: options of torch's DistributedDataParallel, such as find_unused_parameters=True.

    Returns the model. A second call with the same options does nothing. Raises UsageError if an argument cannot be
    used, RanksDiffer if the ranks' models differ.

        model = samestep.replicate(Net().to(device))
    """
    if others:
        raise UsageError(
            f"replicate got {type_of(model)} and {type_of(others[0])}, and takes one model; write "
            "model = samestep.replicate(model) for each model, and leave the optimizer as it is"
        )
    target = _checked(model, ddp)
    group = joined()
    ddp |= json.loads(os.environ.get("SAMESTEP_DDP", "{}"))  # what `samestep scale --vary` tries
    replicas, asked = group.the(Replicas), (same, exact, loss, sync_batchnorm, ddp)
    if replicas.asked.get(target) == asked:
        return model  # as where a function that trains it is called again
    if replica_of(model) is not None or target in replicas.asked:
        raise UsageError("this model is replicated already, with other options; call replicate once")
    _check_modes(same, exact, loss, sync_batchnorm)
    same = not exact and (os.environ.get("SAMESTEP_SAME") == "1" if same is None else same)
    check_every()
    group.the(Divergence)
    if group.world.size > 1 or exact:
        synced = same if sync_batchnorm is None else sync_batchnorm
        _make_replica(target, replicas, ddp, same=same, exact=exact, sums=loss == "sum", synced=synced)
    else:
        replicas.alone[target] = loss == "sum"
    replicas.asked[target] = asked
    if group.world.size == 1 and not exact and os.environ.get("SAMESTEP_METHOD") == "dataparallel":
        return torch.nn.DataParallel(model)  # type: ignore[return-value]  # `samestep scale` compares with it
    return model


def _make_replica(
    target: torch.nn.Module,
    replicas: Replicas,
    ddp: dict[str, Any],
    *,
    same: bool,
    exact: bool,
    sums: bool,
    synced: bool,
) -> None:
    """Collective. Check that the model can be shared, prepare its layers and draws, and make it a replica."""
    group = replicas.group
    if group.world.size > 1:
        _check_device(target, group.world.device)
        _check_own(target, replicas)
        check_alike(target, group)
        group.the(Optimizers)
    if synced:
        convert(target)
    if exact:
        group.the(FixedArithmetic).fix()
        replicas.add(target, {}, sums=sums, tree=Tree(target, group, sums=sums))
        return
    if same:
        group.the(Draws).begin()
        group.the(Padding).begin()
        note_layouts(target)
    elif not group.the(Draws).active:
        replicas.draw_apart()
    if any(parameter.requires_grad for parameter in target.parameters()):
        _remark_own(target, replicas.group)
        with group.the(Evaluations).undisturbed():
            replicas.add(target, ddp, sums=sums)
    else:
        broadcast((*target.parameters(), *target.buffers()))


def _check_modes(same: bool | None, exact: bool, loss: str, sync_batchnorm: bool | None) -> None:
    if loss not in ("mean", "sum"):
        raise UsageError(f"replicate got loss={loss!r}, which is not a reduction; use 'mean' or 'sum'")
    if sync_batchnorm and exact:
        raise UsageError(
            "replicate got sync_batchnorm=True and exact=True, which takes statistics per microbatch; "
            "drop sync_batchnorm"
        )
    if same and exact:
        raise UsageError(
            "replicate got same=True and exact=True; same=True gives the serial script's numbers in the plain "
            "loop, exact=True equal bits with samestep.steps: choose one"
        )


def _checked(model: Any, ddp: dict[str, Any]) -> torch.nn.Module:
    """The module itself; of a compiled module the original."""
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"replicate got {type_of(model)}; pass the torch.nn.Module itself")
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.DataParallel):
            where = f" as {name}" if name else ""
            raise UsageError(
                f"replicate got an nn.DataParallel{where}, which splits batches itself; write its .module in its place"
            )
    if isinstance(model, DistributedDataParallel):
        raise UsageError("this model is replicated already; call replicate once, on the model itself")
    if unknown := ddp.keys() - inspect.signature(DistributedDataParallel.__init__).parameters.keys():
        raise UsageError(
            f"replicate knows no option {', '.join(sorted(unknown))}; it takes those of DistributedDataParallel"
        )
    target: torch.nn.Module = getattr(model, "_orig_mod", model)
    tensors = (*target.parameters(), *target.buffers())
    if any(map(is_lazy, tensors)):
        raise UsageError(
            f"replicate got {type_of(target)} with lazy parameters, which have no shape yet; call the model "
            "with one batch first"
        )
    if any(tensor.is_meta for tensor in tensors):
        raise UsageError(
            f"replicate got {type_of(target)} on the meta device, which has no values; write "
            "model.to_empty(device=device) and initialize it first"
        )
    return target


@contextmanager
def no_sync(model: torch.nn.Module, enabled: bool = True) -> Iterator[None]:
    """Local. Context manager: backward passes inside add to this rank's gradients and exchange nothing.

    The next backward pass outside exchanges the sum, as with DDP's no_sync. It saves time where several backward
    passes come before one optimizer step.

    model: what `replicate` returned; any other model raises UsageError.
    enabled: False makes the block do nothing. Default True.

        with samestep.no_sync(model, enabled=not last):
            loss = F.cross_entropy(model(x), y) / 4
            loss.backward()
    """
    replica = replica_of(model)
    if replica is None and joined().world.size > 1:
        raise UsageError("no_sync got a model that is not replicated; pass what replicate returned")
    if replica is None or replica.ddp is None or not enabled:
        yield
        return
    with replica.ddp.no_sync():
        yield


def _remark_own(model: torch.nn.Module, group: Group) -> None:
    """Print what makes the model's step another than the serial script's: own statistics, or else own masks."""
    modules = list(model.modules())
    if any(isinstance(each, BATCH_NORMS) and not isinstance(each, _SYNCED) for each in modules):
        group.say(
            "BatchNorm takes its statistics from each rank's share alone; samestep run --same, or replicate(model, "
            "same=True), takes them, and dropout's masks, as the serial script does"
        )
    elif not group.the(Draws).active and any(map(_drops_out, modules)):
        group.say(
            "dropout draws other masks than in the serial script; samestep run --same, or replicate(model, same=True), "
            "draws the serial script's"
        )


def _drops_out(module: torch.nn.Module) -> bool:
    if isinstance(module, torch.nn.RNNBase | torch.nn.MultiheadAttention):
        return module.dropout > 0
    return isinstance(module, _DropoutNd) and module.p > 0


def _check_device(model: torch.nn.Module, own: torch.device) -> None:
    devices = {parameter.device for parameter in model.parameters()}
    if is_elsewhere(devices, own, by_nccl="nccl" in dist.get_backend()):
        raise UsageError(
            f"replicate found parameters on {', '.join(sorted(map(str, devices)))} and this rank's device is {own}; "
            "write replicate(model.to(samestep.init().device))"
        )


def _check_own(model: torch.nn.Module, replicas: Replicas) -> None:
    """Raise where a trained parameter belongs to another replica too: both would exchange its gradient."""
    # A replica that has been trained is one no more, as of an encoder that is now to be tuned together with a new head.
    trained = {id(parameter): name for name, parameter in model.named_parameters() if parameter.requires_grad}

    def shared() -> Iterator[tuple[str, Replica]]:
        for replica in replicas:
            names = (trained.get(id(weight)) for weight in replica.model.parameters() if weight.requires_grad)
            yield from ((name, replica) for name in names if name)

    if any(shared()):
        gc.collect()  # a model and its replica refer to each other, so a deleted model may still be in memory
    over = [replica for _, replica in shared() if replica.has_trained]
    while over:  # a replica is one of `replicas` as long as there is a reference to it
        over.pop().leave()
    for name, replica in shared():
        kind = type(replica.model).__name__
        raise UsageError(
            f"replicate got {type_of(model)} whose parameter {name} is also of a {kind} that is replicated "
            "already, and only one of them can exchange its gradient; hold both in one torch.nn.Module that calls "
            f"them in its forward, and replicate that, or del the {kind} if its training is over"
        )


def is_elsewhere(devices: set[torch.device], own: torch.device, *, by_nccl: bool) -> bool:
    """Whether a model is on another rank's device, or has parts on devices that NCCL cannot send from."""
    kinds = {device.type for device in devices}
    if by_nccl and kinds - {own.type}:
        return True
    return own.type != "cpu" and own.type in kinds and own not in devices
