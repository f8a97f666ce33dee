"""Says that a script trains on a torch DataLoader, which gives every rank the whole data set and no rank a share.

Covered: a DataLoader with a sampler that torch made, where the ranks' data sets look alike. Not covered: streams, and
batches that the script cuts by hand.
"""

import gc
from collections.abc import Iterator
from typing import Any
from zlib import crc32

import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, Subset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from samestep.train.group.group import Group

_MOST_ELEMENTS = 64


def say_if_unshared(group: Group, call: str) -> None:
    """Collective. Look for a DataLoader that is iterated on every rank, over a data set that looks the same on all."""
    description, text = "", ""
    for dataset, batch_size in _iterated():
        description = repr([batch_size, *_description(dataset)])
        text = (
            f"{call} trains on batches of a torch DataLoader: every rank goes through all {len(dataset)} samples, and "
            f"no rank has a share of a batch; write samestep.loader(dataset, {batch_size}, ...)"
        )
    if len(set(group.all_gather(f"samestep's check of {call}", crc32(description.encode())))) == 1 and text:
        group.say(text, what="unshared")


def _iterated() -> Iterator[tuple[Any, int]]:
    """Data set and batch size of every DataLoader that is iterated and whose sampler gives all samples."""
    for iterator in [found for found in gc.get_objects() if isinstance(found, _BaseDataLoaderIter)]:
        batches = iterator._index_sampler
        if type(batches) is BatchSampler and type(batches.sampler) in (RandomSampler, SequentialSampler):
            yield iterator._dataset, batches.batch_size


def _description(dataset: Any) -> list[Any]:
    """What differs where ranks have parts of the data: lengths, and the first elements of what it holds."""
    held = dataset.indices if isinstance(dataset, Subset) else list(vars(dataset).values())
    return [type(dataset).__name__, len(dataset), _beginning(held)]


def _beginning(value: Any, depth: int = 3) -> Any:
    if isinstance(value, torch.Tensor) or hasattr(value, "__array__"):
        return list(value.shape), value[:1].tolist() if len(value.shape) else value.item()
    if isinstance(value, list | tuple | range | dict) and depth:
        elements = list(value.items()) if isinstance(value, dict) else value[:_MOST_ELEMENTS]
        return [len(value), *(_beginning(element, depth - 1) for element in elements[:_MOST_ELEMENTS])]
    return value if isinstance(value, bool | int | float | str | bytes) else None
