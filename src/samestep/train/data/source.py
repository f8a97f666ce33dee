"""From which source a loader reads: tensors in memory, or torch's DataLoader with the user's options."""

import inspect
import multiprocessing
import sys
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from samestep.errors import UsageError
from samestep.train.data.batches import FromMemory, FromWorkers
from samestep.train.group.device import overlaps

_OF_WORKERS = {"persistent_workers", "prefetch_factor", "multiprocessing_context", "timeout"}
_OURS = {"batch_sampler", "shuffle", "batch_size", "drop_last", "generator", "dataset"}


def check_dataset(dataset: Any) -> None:
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise UsageError(
            f"loader got {type(dataset).__name__}, a stream without an order to share; give it a dataset "
            "with __len__ and __getitem__, or take every world.size-th element of the stream yourself"
        )
    if not hasattr(dataset, "__len__"):
        raise UsageError(f"loader got {type(dataset).__name__}, which has no length; give it a __len__")


def source_of(
    dataset: Any, options: dict[str, Any], device: torch.device, own_cores: int
) -> FromMemory | FromWorkers:
    if refused := options.keys() & _OURS:
        raise UsageError(f"loader makes its own {', '.join(sorted(refused))}; leave it out, or pass sampler=")
    if unknown := options.keys() - inspect.signature(DataLoader.__init__).parameters.keys():
        raise UsageError(
            f"loader knows no option {', '.join(sorted(unknown))}; it takes those of torch's DataLoader"
        )
    # elsewhere there is nothing to pin for, and torch may fail at it
    pin = options["pin_memory"] = bool(options.get("pin_memory", True)) and overlaps(device)
    if type(dataset) is TensorDataset and options.keys() <= {"pin_memory", "num_workers"}:
        return FromMemory(dataset, pin)
    if "num_workers" not in options:
        method = multiprocessing.get_start_method(allow_none=True)
        # Python 3.14 does not fork unless it is asked to, and no other way takes a script as it is
        forks = method == "fork" or (method is None and sys.platform == "linux")
        options["num_workers"] = own_cores - (device.type == "cpu") if forks else 0
        if forks:
            options.setdefault("multiprocessing_context", "fork")
        if not options["num_workers"]:
            # said of workers, of which a rank with one core has none
            options = {name: value for name, value in options.items() if name not in _OF_WORKERS}
    if options["num_workers"]:
        options.setdefault("persistent_workers", True)
    return FromWorkers(dataset, options)
