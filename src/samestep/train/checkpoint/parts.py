"""The parts of a Checkpoint; checks of its arguments, and of a commit's contents before it is loaded."""

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import zip_longest
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from samestep.errors import CheckpointError, SamestepError, UsageError
from samestep.text import printable, type_of
from samestep.train.checkpoint import capture
from samestep.train.data.loader import Loader
from samestep.train.digest import bit_sums
from samestep.train.group.group import Group
from samestep.train.model.exchange import averages
from samestep.train.model.replicas import Replicas
from samestep.train.nested import memory_of, named_tensors
from samestep.train.optimizers import Optimizers
from samestep.train.step import Spine

OWN = "samestep"
_CALL = "samestep.Checkpoint.commit"
# keys of a state_dict of an optimizer, a scheduler, a scaler or a loader: the script passed a copy of a state
_OF_STATE_DICTS = {"param_groups", "_step_count", "_growth_tracker", "fingerprint"}
ACCEPTED_AS = {
    "length": "dataset",
    "fingerprint": "dataset",
    "batch_size": "batch_size",
    "microbatch": "batch_size",
    "seed": "seed",
    "shuffle": "order",
    "drop_last": "order",
    "num_workers": "order",
}


class Part(Protocol):
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Any, /) -> Any: ...


class Values:
    """A dict of the script as a part: every rank's values, stored once if they are equal."""

    def __init__(self, name: str, values: dict[str, Any], parts: Mapping[str, Any], group: Group) -> None:
        self._name, self._values, self._parts, self._group = name, values, parts, group
        self._began, self._messages = list(values), [capture.message_of({name: values})]

    def gather(self) -> None:
        """Collective. Gather every rank's present values."""
        mine = capture.message_of({self._name: self._values})
        sent = self._group.all_gather("samestep.Checkpoint.commit", mine)
        self._messages = sent if len(set(sent)) > 1 else sent[:1]

    def state_dict(self) -> dict[str, Any]:
        of_ranks = [capture.of_message(message)[self._name] for message in self._messages]
        return {"of_ranks": of_ranks, "began": self._began}

    def load_state_dict(self, state: Any) -> None:
        world, of_ranks = self._group.world, state["of_ranks"]
        if len(of_ranks) not in (1, world.size):
            raise CheckpointError(
                f"the checkpoint's {self._name} has other values on each of its {len(of_ranks)} ranks, and this run "
                f"has {world.size}; go on with {len(of_ranks)}, or keep in it what samestep.sum or mean returns"
            )
        saved = of_ranks[world.rank % len(of_ranks)]
        known = {*saved, *state.get("began", ())}  # the script has gained other keys, or removed known ones
        added = {key: value for key, value in self._values.items() if key not in known}
        # a dict that still holds a model's own weights must not change them
        states = (part.state_dict() for part in self._parts.values() if not isinstance(part, dict))
        taken = {memory_of(tensor) for state in states for _, tensor in named_tensors(state)}
        _put_back(self._values, saved, world.device, taken)
        self._values.update(added)


def _put_back(old: Any, value: Any, device: torch.device, taken: set[int]) -> Any:
    """The saved value, in the script's own dict, list or tensor where it fits: a variable may refer to that too."""
    # `taken` are the ids of dicts and lists, and the memory of tensors, that are not to be changed.
    key = memory_of(old) if isinstance(old, Tensor) else id(old)
    own: Any = old if type(old) is type(value) and key not in taken else None
    taken.add(key)
    if isinstance(value, Tensor):
        is_like = own is not None and own.shape == value.shape and own.dtype == value.dtype
        if is_like and own.is_contiguous() and not (own.requires_grad or own.is_inference()):
            return own.copy_(value)
        return value.to(old.device if isinstance(old, Tensor) else device)
    if isinstance(value, dict):
        own = type(value)() if own is None else own
        before = dict(own)
        own.clear()
        own.update((key, _put_back(before.get(key), item, device, taken)) for key, item in value.items())
        return own
    if isinstance(value, list | tuple):
        items = [_put_back(*pair, device, taken) for pair in zip_longest((own or ())[: len(value)], value)]
        if not isinstance(own, list):
            return type(value)(items)
        own[:] = items
        return own
    return value


def place_of(name: str, loader: Loader[Any], *, keeps_values: bool) -> str:
    """A sentence on how much of a loader's data is done, and on sums that the script does not keep."""
    state, size = loader.state_dict(), loader.batch_size
    length, position, epochs = state.get("length"), state["position"], state["epoch"]
    done, ends = f"{position} samples", ""
    if length and size:
        left = (length - position + (0 if loader.drop_last else size - 1)) // size
        done = f"{len(loader) - left} of {len(loader)} batches"
        ends = "" if left else ", so the loop over them is empty"
    if position and not ends and not keeps_values:
        ends = "; what the loop adds up over an epoch, as in total += loss.item(), lacks these unless a part keeps it"
    done = f" and {done} of the next" if position else ""
    return f"; {name} has done {epochs} epoch{'' if epochs == 1 else 's'}{done}{ends}"


def checked_every(every: int | timedelta) -> int | timedelta:
    whole = isinstance(every, int) and not isinstance(every, bool) and every > 0
    if not whole and not (isinstance(every, timedelta) and every > timedelta(0)):
        raise UsageError(
            f"every={every!r} is neither a number of steps nor a timedelta; use every=100 or a timedelta"
        )
    return every


def checked_parts(
    directory: Any, unnamed: Sequence[Any], parts: Mapping[str, Any], group: Group
) -> dict[str, Part]:
    if not isinstance(directory, str | os.PathLike):
        raise UsageError(
            f"Checkpoint got {type_of(directory)} as its directory, which comes first; write "
            "Checkpoint('runs/commits', model=model, optimizer=optimizer, train=train)"
        )
    if unnamed:
        raise UsageError(
            f"Checkpoint got {type_of(unnamed[0])} without a name; write Checkpoint(directory, model=model, "
            "optimizer=optimizer, train=train)"
        )
    if not parts:
        raise UsageError(
            "Checkpoint got no parts to keep; pass model=model, optimizer=optimizer, train=train"
        )
    if OWN in parts:
        raise UsageError(f"Checkpoint keeps its own state as {OWN}; give your part another name")
    checked: dict[str, Part] = {}
    for name, part in parts.items():
        is_own = type(part) is dict and not part.keys() & _OF_STATE_DICTS
        checked[name] = Values(name, part, parts, group) if is_own else part
        if not hasattr(checked[name], "state_dict") or not hasattr(checked[name], "load_state_dict"):
            its_values = f", such as vars({name})" if hasattr(part, "__dict__") else ""
            raise UsageError(
                f"Checkpoint cannot keep {name}, {type_of(part)} without state_dict and load_state_dict; "
                f"give what has both, or a dict of values of your own{its_values}"
            )
    return checked


def load_part(name: str, part: Part, state: Any) -> None:
    """Load a part's state; any error of a state that does not fit becomes a CheckpointError."""
    try:
        if isinstance(part, LRScheduler) and (missing := part.state_dict().keys() - state.keys()):
            raise KeyError(", ".join(sorted(missing)))  # torch's schedulers take any state
        part.load_state_dict(state)
    except SamestepError:
        raise
    except Exception as error:
        why = printable(" ".join(str(error).split()), 400)  # torch's are of several lines
        raise CheckpointError(
            f"the checkpoint's {name} does not fit this run's ({why}); use the parts it was made "
            "with, or another directory"
        ) from error
    if isinstance(part, Optimizer):
        _lay_out_as_parameters(part)


def accumulated(parts: Mapping[str, Part], group: Group) -> dict[str, list[Tensor | None]]:
    """Collective. The gradients that the optimizers have not used yet, equal on all ranks; sparse ones are left out."""
    kept, backwards = {}, group.the(Spine).backwards
    for name, part in parts.items():
        if isinstance(part, Optimizer) and backwards > group.the(Optimizers).used.get(part, 0):
            weights = _weights_of(part)
            grads = [weight.grad for weight in weights]
            sums = bit_sums(torch.zeros(1) if grad is None or grad.is_sparse else grad for grad in grads)
            if not group.the(Replicas).exact and len(set(group.all_gather(_CALL, sums))) > 1:
                # no_sync has kept each rank's own, and the commit must not change them; rank 0 may have none
                mean_of = dict(averages(weights))
                grads = [
                    grad if grad is not None and grad.is_sparse else mean_of.get(weight)
                    for weight, grad in zip(weights, grads, strict=True)
                ]
            kept[name] = [None if grad is None or grad.is_sparse else grad for grad in grads]
    return kept


def accumulate_again(parts: Mapping[str, Any], kept: Mapping[str, Any], group: Group) -> None:
    """Put the gradients of `accumulated` back."""
    for name, grads in kept.items():
        group.the(Spine).backwards += 1
        for weight, grad in zip(_weights_of(parts[name]), grads, strict=True):
            weight.grad = None if grad is None else torch.empty_like(weight).copy_(grad)


def _weights_of(optimizer: Optimizer) -> list[torch.nn.Parameter]:
    return [weight for settings in optimizer.param_groups for weight in settings["params"]]


def _lay_out_as_parameters(optimizer: Optimizer) -> None:
    """Give each state tensor its parameter's strides, which a file does not keep; fused optimizers need them."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            is_like = isinstance(value, Tensor) and value.shape == parameter.shape
            if is_like and value.stride() != parameter.stride():
                state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
