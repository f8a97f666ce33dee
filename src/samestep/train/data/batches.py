"""Makes a batch of a share: gathers it from memory or has workers load it, and copies it to the device ahead of use."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate, get_worker_info

from samestep.train.data.collated import Collated
from samestep.train.group.device import moved
from samestep.train.nested import map_tensors
from samestep.train.passes import Ragged
from samestep.train.streams import seed_host, seed_of, streams_kept

_Key = tuple[int, int, int]
# the samples to read for a batch; and which of them are this rank's, if other ranks' samples are read too
Planned = tuple[torch.Tensor, slice | None]
Batch = tuple[Any, dict[str, Ragged]]


class FromMemory:
    """A dataset of tensors in memory: a batch is one index_select for each tensor."""

    collates = False

    def __init__(self, dataset: TensorDataset, pin: bool) -> None:
        self._dataset, self._pin = dataset, pin
        devices = {tensor.device for tensor in dataset.tensors}
        self.device = devices.pop() if len(devices) == 1 else torch.device("cpu")

    def batches(self, plan: Iterator[Planned], epoch: int, seed: int) -> Iterator[Batch]:
        for indices, _ in plan:
            yield [self._gathered(tensor, indices) for tensor in self._dataset.tensors], {}

    def _gathered(self, tensor: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        if not self._pin or tensor.device.type != "cpu" or tensor.requires_grad:
            return tensor.index_select(0, indices.to(tensor.device))
        # torch's allocator reuses pinned memory only after the copies from it
        room = torch.empty(len(indices), *tensor.shape[1:], dtype=tensor.dtype, device="cpu", pin_memory=True)
        return torch.index_select(tensor, 0, indices, out=room)

    def sample(self, index: int) -> list[torch.Tensor]:
        return [tensor[index] for tensor in self._dataset.tensors]


class FromWorkers:
    """Any other dataset, through torch's DataLoader."""

    device = torch.device("cpu")

    def __init__(self, dataset: Any, options: dict[str, Any]) -> None:
        self._plan = _Plan()
        self._dataset = _Seeded(dataset)
        collate = options.get("collate_fn")
        self.collates = collate is not None
        self.has_workers = bool(options.get("num_workers"))
        # without workers on_device pins, and torch would also try to pin what is on the device already
        options["pin_memory"] = options.get("pin_memory", False) and self.has_workers
        options["collate_fn"] = Collated(collate or default_collate)
        options["worker_init_fn"] = partial(begin_worker, options.get("worker_init_fn"))
        # without this generator DataLoader would draw from the script's stream at the start of each pass
        self._loader: DataLoader[Any] = DataLoader(
            self._dataset, batch_sampler=self._plan, generator=torch.Generator(), **options
        )

    def batches(self, plan: Iterator[Planned], epoch: int, seed: int) -> Iterator[Batch]:
        self._plan.keys = (([(seed, epoch, at) for at in indices.tolist()], part) for indices, part in plan)
        with torch.device("cpu"):  # DataLoader draws on the script's default device, and needs the CPU
            return iter(self._loader)

    def sample(self, index: int) -> Any:
        """A sample with fixed random draws, for the fingerprint."""
        return self._dataset.__getitems__(([(0, 0, index)], None))[0][0]


class _Plan:
    """A batch sampler with the keys of the pass that is being started."""

    keys: Iterator[tuple[list[_Key], slice | None]] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.keys


class _Seeded(Dataset[Any]):
    """Seeds the random draws of a sample by (seed, epoch, sample), so that no worker or rank changes them."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitems__(self, planned: tuple[list[_Key], slice | None]) -> tuple[list[Any], slice | None]:
        keys, part = planned
        with nullcontext() if get_worker_info() is not None else streams_kept():
            return [self._sample(*key) for key in keys], part

    def _sample(self, seed: int, epoch: int, index: int) -> Any:
        seed_host(seed_of(seed, epoch, index))
        return self.dataset[index]


def begin_worker(users: Callable[[int], None] | None, number: int) -> None:
    """A worker_init_fn; `users` is the script's."""
    _outlive_sigterm()
    torch.set_default_device(None)  # a process that was forked cannot use the rank's device
    sys.exit = _refuse_exit
    if users is not None:
        users(number)


def _refuse_exit(status: object = None) -> NoReturn:
    """Replaces sys.exit in a loader's worker, where it would end the worker without a message."""
    raise RuntimeError(f"a worker of a loader called sys.exit({status!r}); raise an exception there")


def _outlive_sigterm() -> None:
    """In a loader's worker: ignore a SIGTERM that a scheduler sends to all processes, if the rank handles SIGTERM."""
    # Otherwise the worker would end, and the rank, which commits at a SIGTERM, would fail without its worker. The
    # worker still ends at a SIGTERM that its rank sends.
    if not callable(signal.getsignal(signal.SIGTERM)):
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_at_the_ranks_sigterm, daemon=True).start()


def _end_at_the_ranks_sigterm() -> None:
    # only sigwaitinfo tells who sent the signal
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)


def content(sample: Any) -> bytes:
    """The bytes of a sample's tensors, arrays, numbers and text; of other objects the type's name."""
    if isinstance(sample, torch.Tensor):
        with suppress(RuntimeError, TypeError):  # sparse, quantised and nested ones have no array
            sample = (
                sample.detach()
                .cpu()
                .resolve_conj()
                .resolve_neg()
                .contiguous()
                .view(-1)
                .view(torch.uint8)
                .numpy()
            )
    if isinstance(sample, np.ndarray) and sample.dtype.hasobject:
        sample = sample.tolist()
    if hasattr(sample, "tobytes"):
        return bytes(sample.tobytes())
    if isinstance(sample, Mapping):
        return b"".join(content(part) for pair in sample.items() for part in pair)
    if isinstance(sample, list | tuple):
        return b"".join(content(part) for part in sample)
    plain = isinstance(sample, str | bytes | int | float | None)
    return repr(sample if plain else type(sample).__name__).encode()


def on_device(
    batches: Iterator[Any], device: torch.device, side: torch.Stream | None, *, pins: bool = False
) -> Iterator[Any]:
    """The batches on the device; with a side stream a batch is copied while the batch before it is used."""
    # pins: copy from pinned memory, which does not block the script.
    if device.type == "cpu":
        yield from (map_tensors(_pinned, batch, movable=True) for batch in batches) if pins else batches
        return
    waiting: tuple[Any, torch.Event] | None = None
    for batch in batches:
        if side is None:
            yield _moved(batch, device, pins)
            continue
        # the copy may get the memory of an earlier batch, which the current stream may still read
        side.wait_stream(torch.accelerator.current_stream(device))
        with side:
            copied = _moved(batch, device, pins)
        arrived = side.record_event()
        if waiting is not None:
            yield _arrived(*waiting, device)
        waiting = copied, arrived
    if waiting is not None:
        yield _arrived(*waiting, device)


def _moved(batch: Any, device: torch.device, pins: bool = False) -> Any:
    def move(item: Any) -> Any:
        item = _pinned(item) if pins else item
        return moved(item, device) if isinstance(item, torch.Tensor) else item.to(device)

    return map_tensors(move, batch, movable=True)


def _pinned(item: Any) -> Any:
    """A tensor of the host, or an object with a method for it, in pinned memory; others as they are."""
    if isinstance(item, torch.Tensor) and (item.device.type != "cpu" or item.layout != torch.strided):
        return item
    return item.pin_memory() if hasattr(item, "pin_memory") else item


def _arrived(batch: Any, arrived: torch.Event, device: torch.device) -> Any:
    torch.accelerator.current_stream(device).wait_event(arrived)
    return batch
