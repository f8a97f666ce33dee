"""The parts of a Checkpoint; checks of its arguments, and of a commit's contents before it is loaded."""

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from samestep.errors import CheckpointError, SamestepError, UsageError
from samestep.text import printable
from samestep.train.checkpoint import capture
from samestep.train.data.loader import Loader
from samestep.train.group.group import Group

OWN = "samestep"
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

    def __init__(self, name: str, values: dict[str, Any], group: Group) -> None:
        self._name, self._values, self._group = name, values, group
        self._messages = [capture.message_of({name: values})]

    def gather(self) -> None:
        """Collective. Gather every rank's present values."""
        mine = capture.message_of({self._name: self._values})
        sent = self._group.all_gather("samestep.Checkpoint.commit", mine)
        self._messages = sent if len(set(sent)) > 1 else sent[:1]

    def state_dict(self) -> dict[str, Any]:
        return {"of_ranks": [capture.of_message(message)[self._name] for message in self._messages]}

    def load_state_dict(self, state: Any) -> None:
        world, of_ranks = self._group.world, state["of_ranks"]
        if len(of_ranks) not in (1, world.size):
            raise CheckpointError(
                f"the checkpoint's {self._name} has other values on each of its {len(of_ranks)} ranks, and this run "
                f"has {world.size}; go on with {len(of_ranks)}, or keep in it what samestep.sum or mean returns"
            )
        _update(self._values, of_ranks[world.rank % len(of_ranks)], world.device)


def _update(now: dict[str, Any], saved: Mapping[str, Any], device: torch.device) -> None:
    """Update the dict in place; a tensor goes to the device of the tensor that it replaces, or to `device`."""
    for key, value in saved.items():
        old = now.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            _update(old, value, device)
        else:
            target = old.device if isinstance(old, Tensor) else device
            now[key] = value.to(target) if isinstance(value, Tensor) else value


def place_of(name: str, loader: Loader[Any]) -> str:
    """A sentence on how much of a loader's data is done."""
    state, size = loader.state_dict(), loader.batch_size
    length, position, epochs = state.get("length"), state["position"], state["epoch"]
    done, ends = f"{position} samples", ""
    if length and size:
        left = (length - position + (0 if loader.drop_last else size - 1)) // size
        done = f"{len(loader) - left} of {len(loader)} batches"
        ends = "" if left else ", so the loop over them is empty"
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
            f"Checkpoint got a {type(directory).__name__} as its directory, which comes first; write "
            "Checkpoint('runs/commits', model=model, optimizer=optimizer, train=train)"
        )
    if unnamed:
        raise UsageError(
            f"Checkpoint got a {type(unnamed[0]).__name__} without a name; write Checkpoint(directory, model=model, "
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
        checked[name] = Values(name, part, group) if is_own else part
        if not hasattr(checked[name], "state_dict") or not hasattr(checked[name], "load_state_dict"):
            its_values = f", such as vars({name})" if hasattr(part, "__dict__") else ""
            raise UsageError(
                f"Checkpoint cannot keep {name}, a {type(part).__name__} without state_dict and load_state_dict; "
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


def _lay_out_as_parameters(optimizer: Optimizer) -> None:
    """Give each state tensor its parameter's strides, which a file does not keep; fused optimizers need them."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            is_like = isinstance(value, Tensor) and value.shape == parameter.shape
            if is_like and value.stride() != parameter.stride():
                state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
