"""Says what a script forgot: to share its training data, or to add up what an evaluation counted.

Covered: a DataLoader with a sampler that torch made, where the ranks' data sets look alike; an evaluation over a loader
that only some ranks iterate, or after which nothing is totalled before the next epoch of training; a loop without
backward(), such as one that adds up statistics of the data, likewise.
Not covered: streams, batches that the script cuts by hand, and one of several evaluations.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, Subset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from samestep.text import counted, name_ranks
from samestep.train.group.alive import Hidden, alive
from samestep.train.group.control import users_line
from samestep.train.group.group import Group, Member
from samestep.train.passes import Pass
from samestep.train.script.lines import only_counts
from samestep.train.step import Spine
from samestep.train.subscriber import Subscriber

_MOST_ELEMENTS = 64


class Evaluations(Member, Subscriber):
    """Counts the evaluations, and remembers how many totals were taken when the latest one ended."""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self._spine = group.the(Spine)
        self._spine.subscribe(self)
        self._text = self._line = ""
        self._totals_before = (0, 0)
        self._count = self._backwards = 0
        # for each pass, how many backwards and totals there were when it began
        self._begun_at = weakref.WeakKeyDictionary[Pass, tuple[int, ...]]()
        group.watch(lambda: self._count, self._unlike_counts)
        self._barrier_of_torch = group.replace(dist, "barrier", self._barrier)

    def pass_ends(self, ended: Pass) -> None:
        backwards, *totals = self._begun_at.get(ended, (-1, 0, 0))
        if ended.training and self._backwards > backwards:
            return
        latest, size = ended.latest, self.group.world.size
        if not ended.training:
            self._count += 1
        elif latest is not None and latest.all < size:
            self.group.say(
                f"the last batch of the loop at {users_line()} has {counted(latest.all, 'sample')} for {size} ranks, "
                "so some ranks got samples of others, and the loop called no backward(); if it is an evaluation, use "
                "torch.no_grad() or model.eval(), and each sample counts once"
            )
        self._line, self._totals_before = users_line(), self._totals()
        total = latest.batch_start + latest.all if latest else 0
        batches = sum(count for _, count in ended.sizes)
        # the script may take the total of each batch
        are_totalled = any(now - then >= batches for now, then in zip(self._totals(), totals, strict=True))
        if ended.counted < total and not are_totalled and not only_counts():
            kind, used = ("loop", "total") if ended.training else ("evaluation", "correct")
            self._text = (
                f"the {kind} at {self._line} {'called no backward() and ' * ended.training}was not followed by "
                f"samestep.sum, mean or gather: what it counted is of this rank's {ended.counted} of its {total} "
                f"samples; write samestep.sum({used}) where it is used"
            )

    def pass_begins(self, begun: Pass) -> None:
        if begun.training:
            self._say_if_untotalled()
        self._begun_at[begun] = self._backwards, *self._totals()

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Context manager: a barrier, and what samestep itself exchanges, is no total of the script."""
        is_due = self._totals() == self._totals_before
        yield
        if is_due:
            self._totals_before = self._totals()

    def _barrier(self, *args: Any, **kwargs: Any) -> Any:
        with self.undisturbed():
            return self._barrier_of_torch(*args, **kwargs)

    def phase_begins(self, phase: str, call: str) -> None:
        if phase in ("backward", "optimizer"):
            self._backwards += 1

    def close(self) -> None:
        self._say_if_untotalled()

    def _say_if_untotalled(self) -> None:
        if self._text and self._totals() == self._totals_before:
            self.group.say(self._text, what="no total")
        self._text = ""

    def _unlike_counts(self, counts: list[int], call: str) -> None:
        """Say that some ranks evaluated alone: each saw its share, and what the others have was seen by nobody."""
        alone = [rank for rank, count in enumerate(counts) if count == max(counts)]
        at = f" ({self._line})" if self._line else ""
        self.group.say(
            f"before {call}, {name_ranks(alone)} evaluated over a samestep.loader{at} and the other ranks did not: a "
            "rank sees its share of the samples alone; evaluate on every rank, and take samestep.sum of what it counts",
            what="evaluated alone",
        )
        self._count = max(counts)

    def _totals(self) -> tuple[int, int]:
        """How many totals were taken, by samestep and by torch.distributed, which torchmetrics uses."""
        group: Any = dist.group.WORLD
        # a backend that does not count, or one process without a group
        with suppress(RuntimeError, AttributeError):
            return self._spine.totals, group._get_sequence_number_for_group()
        return self._spine.totals, 0


class Begun(Member):
    """The shuffled loaders with a seed that have begun their first epoch, by dataset."""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self._at = weakref.WeakKeyDictionary[Any, tuple[Callable[[], Any], int]]()

    def note(self, loader: Any, dataset: Any, seed: int) -> None:
        """Print a remark where a script makes a new loader for each epoch: each has the order of epoch 0."""
        with suppress(TypeError):  # a list has no weak references
            first, known = self._at.get(dataset, (lambda: loader, None))
            self._at[dataset] = weakref.ref(loader), seed
            if first() is not loader and seed == known:
                self.group.say(
                    f"a second loader over the same data begins at epoch 1 with seed={seed}, in the order that the "
                    "first one had; in a loop over epochs make the loader once, before the loop",
                    what="a second loader",
                )


def say_if_unshared(group: Group, call: str) -> None:
    """Collective. Look for a DataLoader that is iterated on every rank, over a data set that looks the same on all."""
    description, text = "", ""
    for dataset, batch_size in _iterated(group.hidden):
        description = repr([batch_size, *_description(dataset)])
        text = (
            f"{call} trains on batches of a torch DataLoader: every rank goes through all {len(dataset)} samples, and "
            f"no rank has a share of a batch; write samestep.loader(dataset, {batch_size}, ...)"
        )
    if len(set(group.all_gather(f"samestep's check of {call}", crc32(description.encode())))) == 1 and text:
        group.say(text, what="unshared")


def _iterated(hidden: Hidden) -> Iterator[tuple[Any, int]]:
    """Data set and batch size of every DataLoader that is iterated and whose sampler gives all samples."""
    for iterator in list(alive(_BaseDataLoaderIter, hidden)):
        batches = iterator._index_sampler
        if type(batches) is BatchSampler and type(batches.sampler) in (RandomSampler, SequentialSampler):
            yield iterator._dataset, batches.batch_size


def _description(dataset: Any) -> list[Any]:
    """What differs where ranks have parts of the data: lengths, and the first elements of what it holds."""
    if isinstance(dataset, Subset):
        held = dataset.indices
    else:
        held = [*vars(dataset).values()] if hasattr(dataset, "__dict__") else dataset  # a list of samples
    return [type(dataset).__name__, len(dataset), _beginning(held)]


def _beginning(value: Any, depth: int = 3) -> Any:
    if isinstance(value, torch.Tensor) or hasattr(value, "__array__"):
        return list(value.shape), value[:1].tolist() if len(value.shape) else value.item()
    if isinstance(value, list | tuple | range | dict) and depth:
        elements = list(value.items()) if isinstance(value, dict) else value[:_MOST_ELEMENTS]
        return [len(value), *(_beginning(element, depth - 1) for element in elements[:_MOST_ELEMENTS])]
    return value if isinstance(value, bool | int | float | str | bytes) else None
