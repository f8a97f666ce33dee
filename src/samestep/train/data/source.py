"""Checks a loader's arguments, and chooses its order and its source: tensors in memory, or torch's DataLoader."""

import hashlib
import inspect
import multiprocessing
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import PurePath
from typing import Any, Literal, Protocol, TypedDict, TypeVar

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
)

from samestep.errors import RanksDiffer, UsageError
from samestep.text import type_of
from samestep.train.data.batches import FromMemory, FromWorkers, content
from samestep.train.data.order import Batched, Order, Sampled
from samestep.train.data.stream import Stream
from samestep.train.group.group import Group
from samestep.train.group.world import World
from samestep.train.step import Spine

Item = TypeVar("Item", covariant=True)


class Data(Protocol[Item]):
    """A dataset: samples by index. It needs a length too, which torch's own Dataset does not declare."""

    def __getitem__(self, index: int, /) -> Item: ...


class Options(TypedDict, total=False):
    """on_device, and the options of torch's DataLoader that a loader passes on."""

    on_device: bool

    sampler: Iterable[int] | None
    batch_sampler: Iterable[Sequence[int]] | None
    num_workers: int | Literal["auto"]
    collate_fn: Callable[[list[Any]], Any] | None
    pin_memory: bool
    timeout: float
    worker_init_fn: Callable[[int], None] | None
    multiprocessing_context: Any
    generator: torch.Generator | None
    prefetch_factor: int | None
    persistent_workers: bool
    pin_memory_device: str
    in_order: bool


Kind = TypeVar("Kind", bound=Any)
_DRAWN_ALIKE = (
    "seed what draws them on every rank, and draw them before the first batch, or with same=True; leave a split by "
    "rank to samestep.loader"
)
_OF_WORKERS = {"persistent_workers", "prefetch_factor", "multiprocessing_context", "timeout"}


def taken_over(dataloader: "DataLoader[Any]", given: dict[str, Any]) -> dict[str, Any]:
    """The arguments for a loader with the same batches as a torch DataLoader."""
    data = dataloader.dataset
    if given:
        raise UsageError(
            f"loader got a DataLoader and {', '.join(sorted(given))}; write loader(dl.dataset, batch_size=..., ...), "
            "or give the options to the DataLoader"
        )
    sampler: Any = dataloader.sampler
    if dataloader.batch_size is None and dataloader.batch_sampler is None:
        raise UsageError(
            "loader got a DataLoader with batch_size=None, and shares batches of samples; write loader(dl.dataset, "
            "batch_size=..., sampler=...)"
        )
    shuffles = type(sampler) is RandomSampler
    if shuffles:
        draws_once = not sampler.replacement and sampler.num_samples == len(sampler.data_source)
        shuffles = draws_once and sampler.generator is dataloader.generator
    taken: dict[str, Any] = {
        "batch_size": dataloader.batch_size,
        "shuffle": shuffles,
        "drop_last": dataloader.drop_last,
        "num_workers": dataloader.num_workers,
    }
    if dataloader.batch_size is None:
        taken["batch_sampler"] = dataloader.batch_sampler
    elif not shuffles and type(sampler) is not SequentialSampler and not isinstance(data, IterableDataset):
        taken["sampler"] = sampler
    taken |= {
        name: given
        for name in ("worker_init_fn", "generator")
        if (given := getattr(dataloader, name)) is not None
    }
    if dataloader.collate_fn is not default_collate:
        taken["collate_fn"] = dataloader.collate_fn
    if dataloader.num_workers:
        taken |= {name: getattr(dataloader, name) for name in _OF_WORKERS}
    return taken


def check_dataset(dataset: Any) -> None:
    if isinstance(dataset, IterableDataset):
        return
    if not hasattr(dataset, "__getitem__") or isinstance(dataset, str | torch.nn.Module):
        raise UsageError(
            f"loader got {type(dataset).__name__}, which has no samples by index; give it __len__ and __getitem__, or "
            "make it a torch.utils.data.IterableDataset, which every rank can read from its beginning"
        )
    if not hasattr(dataset, "__len__"):
        raise UsageError(f"loader got {type(dataset).__name__}, which has no length; give it a __len__")


def check_batched(batch_size: int | None, options: dict[str, Any]) -> None:
    if batch_size is None and options.get("batch_sampler") is None:
        raise UsageError(
            "loader got no batch_size, the samples of one optimizer step on all ranks together; write "
            "loader(dataset, batch_size=64)"
        )


def check_options(options: dict[str, Any]) -> None:
    generator = options.get("generator")
    if not isinstance(generator, torch.Generator | None):
        raise UsageError(f"generator is {type_of(generator)}; pass a torch.Generator")
    workers = options.get("num_workers", 0)
    if isinstance(workers, str) and workers != "auto":
        raise UsageError(
            f'num_workers is {workers!r}; write a number, or "auto" for as many as there are cores'
        )
    known = inspect.signature(DataLoader.__init__).parameters.keys()
    if unknown := sorted(options.keys() - known):
        near = get_close_matches(unknown[0], known, 1)
        remedy = f"did you mean {near[0]}?" if near else "it takes those of torch's DataLoader"
        raise UsageError(f"loader knows no option {', '.join(unknown)}; {remedy}")


def of_dataloader(loader: Any, name: str) -> Any:
    """What a torch DataLoader with this loader's arguments has as the attribute `name`."""
    known = inspect.signature(DataLoader.__init__).parameters
    if name not in known or name == "self":
        has = "what torch's DataLoader shows of its arguments, epochs, share and state_dict"
        raise AttributeError(f"'Loader' object has no attribute {name!r}; it has {has}")
    if (given := loader._given.get(name)) is not None:
        return 0 if given == "auto" else given
    if name == "batch_sampler":
        return BatchSampler(loader.sampler, loader.batch_size, loader.drop_last)
    return default_collate if name == "collate_fn" else known[name].default


def reads_ahead(options: dict[str, Any]) -> bool:
    """Whether torch would draw the order before the first batch is requested, as it does for workers."""
    return options.get("num_workers", 0) not in (0, "auto")


def order_of(
    dataset: Any,
    batch_size: int | None,
    shuffle: bool,
    drop_last: bool,
    seed: int | None,
    options: dict[str, Any],
    group: Group,
) -> Order:
    """The order of the samples; takes `sampler`, `batch_sampler` and `generator` out of the options."""
    sampler, batch_sampler, generator = (
        options.pop(name, None) for name in ("sampler", "batch_sampler", "generator")
    )
    is_stream = isinstance(dataset, IterableDataset)
    others = {
        "batch_sampler": is_stream and batch_sampler is not None,
        "sampler": sampler is not None,
        "shuffle": shuffle,
        "drop_last": drop_last and not is_stream,
        "batch_size": batch_size is not None and not is_stream,
        "generator": is_stream and generator is not None,
    }
    given = [name for name, is_given in others.items() if is_given]
    if is_stream:
        if given:
            raise UsageError(
                f"loader got a stream, {type(dataset).__name__}, and {', '.join(given)}; a stream gives the order "
                "itself, so leave that out"
            )
        if options.get("num_workers") == "auto":
            raise UsageError(
                "loader got a stream and num_workers='auto', and the order of a stream's samples depends on how many "
                "workers read it; write a number"
            )
        asked = {**options, "batch_size": batch_size, "drop_last": drop_last}
        return Stream(dataset, seed, asked, group)
    if batch_sampler is not None:
        if given:
            raise UsageError(
                f"loader got a batch_sampler and {', '.join(given)}; the batch_sampler makes the batches, so leave "
                "that out"
            )
        return Batched(batch_sampler, seed, group, generator, has_workers=reads_ahead(options))
    if generator is not None and seed is not None:
        raise UsageError(
            "loader got both a generator and a seed; the generator gives the order, so drop seed"
        )
    if sampler is not None and shuffle:
        raise UsageError(
            "loader got both a sampler and shuffle=True; the sampler gives the order, so drop shuffle"
        )
    if shuffle and generator is not None:
        sampler = RandomSampler(dataset, generator=generator)
    if sampler is None:
        return Order(dataset, seed, shuffle, group, generator)
    return Sampled(sampler, seed, group, generator)


def _workers_for(world: World) -> int:
    """A core for each worker; on CPU one is left for the training itself."""
    return world.cores - (world.device.type == "cpu")


def spare_workers(source: FromMemory | FromWorkers | None, world: World) -> int:
    """What num_workers="auto" would give to a loader that reads in the loop."""
    return _workers_for(world) if isinstance(source, FromWorkers) and not source.has_workers else 0


def source_of(dataset: Any, options: dict[str, Any], world: World) -> FromMemory | FromWorkers:
    if type(dataset) is TensorDataset and options.keys() <= {"pin_memory", "num_workers"}:
        return FromMemory(dataset, options["pin_memory"])
    if options.get("num_workers") == "auto":
        method = multiprocessing.get_start_method(allow_none=True)
        # Python 3.14 forks only on request; other start methods would need changes in the script
        forks = method == "fork" or (method is None and sys.platform == "linux")
        options["num_workers"] = _workers_for(world) if forks else 0
        if forks:
            options.setdefault("multiprocessing_context", "fork")
        if not options["num_workers"]:
            # DataLoader refuses these options without workers, and a rank with one core has none
            options = {name: value for name, value in options.items() if name not in _OF_WORKERS}
    return FromWorkers(dataset, options)


def agree(call: str, own: Kind, group: Group) -> Kind:
    """Collective. This rank's loader, after a check that all ranks' loaders iterate the same samples."""
    # what a dataset holds may change by its use, such as a cache, so compare it before that
    indices, floats = chosen(own.dataset, is_unused=not group.the(Spine).batches)
    mine = {**own.facts(), "": indices}
    answers = group.all_gather(call, {**mine, "floats": floats})
    for rank, theirs in enumerate(answers):
        for name, value in mine.items():
            if theirs[name] != value and name:
                raise RanksDiffer(
                    f"{call} got {name} {value} on rank {group.world.rank} and {theirs[name]} on rank {rank}; give "
                    "every rank the same dataset and options"
                )
            if theirs[name] != value:
                raise RanksDiffer(
                    f"{call} got other samples on rank {group.world.rank} than on rank {rank}: the indices of a Subset "
                    f"or the labels differ; {_DRAWN_ALIKE}"
                )
    if odd := [rank for rank, theirs in enumerate(answers) if theirs["floats"] != floats]:
        group.say(
            f"the samples of {call} differ between rank 0 and rank {odd[0]}, so each rank trains on data of its own; "
            f"{_DRAWN_ALIKE}"
        )
    return own


def chosen(dataset: Any, *, is_unused: bool = True) -> tuple[str, str]:
    """Two digests that identify a dataset without loading a sample: of a Subset's indices and of labels in memory, and
    of a few numbers in memory, which each rank may have drawn for itself."""
    digest, floats = hashlib.blake2b(digest_size=8), hashlib.blake2b(digest_size=8)
    for part in _nested(dataset):
        if isinstance(part, Subset):
            # some datasets have other keys than integers
            with suppress(TypeError, ValueError):
                digest.update(np.fromiter(map(int, part.indices), np.int64).tobytes())
        elif isinstance(part, TensorDataset):
            for tensor in part.tensors:
                if tensor.dim() == 1 and not tensor.is_floating_point():
                    digest.update(content(tensor))
                else:
                    floats.update(content(tensor[:: max(1, len(tensor) // 2)]))
        elif is_unused:
            for value in (part, *getattr(part, "__dict__", {}).values()):
                floats.update(content(_some_samples(value, part)))
    return digest.hexdigest(), floats.hexdigest()


def _nested(dataset: Any) -> Iterator[Any]:
    """A dataset and those that it is made of, such as a Subset's, a ConcatDataset's or a wrapper's."""
    waiting, seen = [dataset], set[int]()
    while waiting:
        if id(part := waiting.pop()) not in seen:
            seen.add(id(part))
            yield part
            waiting += part.datasets if isinstance(part, ConcatDataset) else ()
            waiting += (
                value for value in getattr(part, "__dict__", {}).values() if isinstance(value, Dataset)
            )


def _some_samples(value: Any, dataset: Any) -> list[Any]:
    """Numbers and names of three samples in a list, tensor or array with an element for each sample of a dataset."""
    with suppress(TypeError, NotImplementedError):
        length = len(dataset)
        # a class that is derived from list may have a __getitem__ of its own, which reads a sample
        is_plain = type(value) in (list, tuple) or isinstance(value, torch.Tensor | np.ndarray)
        if is_plain and len(value) == length > 0:
            return [_content_of(value[at]) for at in (0, length // 2, length - 1)]
    return []


def _content_of(sample: Any) -> Any:
    """A sample's numbers and names: of a file without its folder, which may be another on each node."""
    if isinstance(sample, list | tuple):
        return [_content_of(part) for part in sample]
    if isinstance(sample, str | PurePath):
        return PurePath(sample).name
    return sample if isinstance(sample, torch.Tensor | np.ndarray | np.generic | int | float) else None


def fingerprint(source: FromMemory | FromWorkers | None, dataset: Any) -> str:
    """A digest of a few samples, which tells datasets of the same length apart."""
    if source is None or not (length := len(dataset)):
        return ""
    digest = hashlib.blake2b(digest_size=8)
    for index in sorted({0, length // 2, length - 1}):
        once, again = (content(source.sample(index)) for _ in range(2))
        # a sample that draws from a generator of its own differs each time
        digest.update(once if once == again else b"varies")
    return digest.hexdigest()
