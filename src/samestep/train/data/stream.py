"""Shares an IterableDataset: every rank reads all of it and keeps its share of each batch.

torch's DataLoader reads it with the script's options, so the batches are those of the serial script, also where workers
take turns. The stream's random draws are a function of the seed of the pass. A resume reads the stream again up to its
position. Not covered: persistent workers, whose random streams would continue from pass to pass.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from samestep.errors import RanksDiffer, UsageError
from samestep.train import streams
from samestep.train.data.batches import Batch, Planned, begin_worker, content
from samestep.train.data.collated import Collated
from samestep.train.data.order import Order
from samestep.train.group.group import Group
from samestep.train.step import cut

# a rank reads at most a few batches ahead of the batch that was handed out last
_KEPT_DIGESTS = 64


class Stream(Order):
    """The order in which an IterableDataset yields its samples."""

    def __init__(
        self, dataset: IterableDataset[Any], seed: int | None, options: dict[str, Any], group: Group
    ) -> None:
        """`options` are those of torch's DataLoader, batch_size and drop_last among them."""
        if options.get("persistent_workers"):
            raise UsageError(
                "loader reads a stream with new workers in each pass, whose draws a resume can repeat; leave "
                "persistent_workers out"
            )
        super().__init__(None, seed, shuffle=False, group=group)
        self.dataset, self.options = dataset, options
        self._drawn_in = b""
        self._reading: Reading | None = None

    def facts(self) -> dict[str, Any]:
        """The workers take turns, so the order of samples is a function of their number."""
        return {"num_workers": self.options.get("num_workers", 0)}

    def _samples(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def begin(self, *, again: bool) -> None:
        self._drawn_in = streams.capture()
        super().begin(again=again)

    def draw(self, epoch: int, *, alike: bool, lazily: bool) -> "Reading":
        """Begin to read; with `lazily` the collate_fn gets the whole batch, which is then cut into shares."""
        expected, self._expected = self._expected, {}
        generator = torch.Generator()
        if self._seed is not None:
            generator.manual_seed(streams.seed_of("stream", self._seed, epoch))
        else:
            first = expected.get("drawn_in", {}).get("streams")
            self._drawn_in = first or self._group.broadcast("samestep.loader's stream draws", self._drawn_in)
            with streams.streams_kept():
                streams.restore(self._drawn_in, ["torch"])
                generator.set_state(torch.get_rng_state())
        self._reading = Reading(self, epoch, generator, expected.get("digest"), cuts=lazily)
        if alike and self._group.world.size > 1:
            self._reading.compare(self._group)
        return self._reading

    def state(self, position: int) -> dict[str, Any]:
        assert self._reading is not None
        drawn_in = {} if self._seed is not None else {"streams": self._drawn_in}
        digest = self._reading.digests.get(position, "")
        return {"order": {"digest": digest, "count": position, "drawn_in": drawn_in}}


class Reading:
    """The batches of a pass, by the positions of their samples."""

    device, collates = torch.device("cpu"), True

    def __init__(
        self, stream: Stream, epoch: int, generator: torch.Generator, expected: str | None, *, cuts: bool
    ) -> None:
        """`expected` is the digest of the batches that were handed out before a resume."""
        world, options = stream._group.world, dict(stream.options)
        self._name, self._epoch, self._expected = type(stream.dataset).__name__, epoch, expected
        self.digests: dict[int, str] = {}
        self._ahead: deque[tuple[int, Batch]] = deque()
        collate = options.pop("collate_fn", None)
        options["collate_fn"] = _Shares(collate, world.rank, world.size, cuts=cuts and collate is not None)
        options["worker_init_fn"] = partial(begin_worker, options.pop("worker_init_fn", None))
        self._draws_here = not options.get("num_workers")
        with streams.streams_kept():
            # as the DataLoader draws the seed of its workers
            torch.set_rng_state(generator.get_state())
            streams.seed_host(streams.draw_seed())
            self._streams = streams.of_host()
        with self._drawing(), torch.device("cpu"):
            self._batches = iter(DataLoader(stream.dataset, generator=generator, **options))
        self._first = self._read()

    def __getitem__(self, part: slice) -> torch.Tensor:
        return torch.arange(part.start, part.stop, device="cpu")

    def compare(self, group: Group) -> None:
        """Collective. Raise RanksDiffer where another rank's stream begins with another batch."""
        mine = self._first[2] if self._first else ""
        for rank, theirs in enumerate(group.all_gather("samestep.loader's stream", mine)):
            if theirs != mine:
                raise RanksDiffer(
                    f"{self._name} gives rank {group.world.rank} other samples than rank {rank}, and every rank has to "
                    "read the same stream; seed what it draws, and leave out what splits it by rank"
                )

    def stops(self, position: int) -> Iterator[int]:
        """The end positions of the batches after `position`; reads these batches."""
        stop, digest, read = 0, "", self._first
        self._first = None
        while read is not None and stop < position:
            _, stop, digest = self._counted(read, stop, digest)
            read = self._read()
        if position and (stop != position or digest != (self._expected or digest)):
            raise UsageError(
                f"{self._name} gives epoch {self._epoch + 1} other samples than before the run was resumed; seed what "
                "it draws, and let each pass begin at its first sample"
            )
        while read is not None:
            batch, stop, digest = self._counted(read, stop, digest)
            self._ahead.append((stop, batch))
            self.digests[stop] = digest
            self.digests.pop(next(iter(self.digests)) if len(self.digests) > _KEPT_DIGESTS else -1, None)
            yield stop
            read = self._read()

    def batches(self, plan: Iterator[Planned], epoch: int, seed: int) -> Iterator[Batch]:
        """The planned batches; in an evaluation small batches are not planned on ranks without a share of them."""
        for positions, _ in plan:
            while self._ahead[0][0] <= positions[-1]:
                self._ahead.popleft()
            yield self._ahead.popleft()[1]

    def _counted(self, read: tuple[Batch, int, str], stop: int, digest: str) -> tuple[Batch, int, str]:
        """A batch, its end position, and a digest of all batches up to it."""
        batch, count, mark = read
        return batch, stop + count, hashlib.blake2b((digest + mark).encode(), digest_size=8).hexdigest()

    def _read(self) -> tuple[Batch, int, str] | None:
        with self._drawing():
            return next(self._batches, None)

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        """Context manager: without workers the dataset is read here, and draws from random streams of its own."""
        if not self._draws_here:
            yield
            return
        with streams.streams_kept():
            streams.set_host(self._streams)
            try:
                yield
            finally:
                self._streams = streams.of_host()


class _Shares:
    """A collate_fn of whole batches; returns this rank's part, the number of samples, and a digest of the batch.

    A rank without a share gets the whole batch, since in training it takes the step too.
    """

    def __init__(
        self, collate: Callable[[list[Any]], Any] | None, rank: int, size: int, *, cuts: bool
    ) -> None:
        self._collate = Collated(collate or default_collate)
        self._rank, self._size, self._cuts = rank, size, cuts

    def __call__(self, samples: list[Any]) -> tuple[Batch, int, str]:
        start, stop = cut(len(samples), self._size, self._rank)
        mine = slice(start, stop) if stop > start else slice(len(samples))
        mark = hashlib.blake2b(content([samples[0], samples[-1], len(samples)]), digest_size=8).hexdigest()
        is_cut = self._cuts and 0 < stop - start < len(samples)
        return self._collate((samples, mine) if is_cut else (samples[mine], None)), len(samples), mark
