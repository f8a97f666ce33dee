"""Shares an IterableDataset: every rank reads all of it and keeps its share of each batch.

torch's DataLoader reads it with the script's options, so the batches are those of the serial script, also where workers
take turns. Without workers and without a seed it draws from the script's random streams, as in the serial script. A
resume reads the stream again up to its position, and repeats these draws. Not covered: persistent workers, whose random
streams would continue from pass to pass.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
from samestep.train.passes import cut

# a rank reads at most a few batches ahead of the batch that was handed out last
_KEPT_DIGESTS = 64
# so many streams of up to 5 kB a state may hold, to repeat what was drawn in turns
_MOST_TURNS = 1000


class Stream(Order):
    """The order in which an IterableDataset yields its samples."""

    draws_at_iter = True

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
        drawn_in, generator = expected.get("drawn_in", {}), torch.Generator()
        if self._seed is None:
            first = drawn_in.get("streams")
            self._drawn_in = first or self._group.broadcast("samestep.loader's stream draws", self._drawn_in)
        with streams.streams_kept():
            if self._seed is None:
                streams.restore(self._drawn_in, streams.OF_HOST)
            else:
                torch.manual_seed(streams.seed_of("stream", self._seed, epoch))
            generator.set_state(torch.get_rng_state())
            # as the DataLoader draws the seed of its workers
            seed = streams.draw_seed()
            if self._seed is not None:
                streams.seed_host(seed)
            draws = _Draws(self._seed is None, lazily, drawn_in.get("parted", []))
        self._reading = Reading(self, epoch, generator, expected, draws, alike=alike, cuts=lazily)
        return self._reading

    def state(self, position: int) -> dict[str, Any]:
        assert self._reading is not None
        parted = self._reading.draws.parted
        drawn_in = {} if self._seed is not None else {"streams": self._drawn_in, "parted": list(parted)}
        digest = self._reading.digests.get(position, "")
        return {"order": {"digest": digest, "count": position, "drawn_in": drawn_in}}


class Reading:
    """The batches of a pass, by the positions of their samples."""

    device, collates = torch.device("cpu"), True

    def __init__(
        self,
        stream: Stream,
        epoch: int,
        generator: torch.Generator,
        expected: dict[str, Any],
        draws: "_Draws",
        *,
        alike: bool,
        cuts: bool,
    ) -> None:
        """`expected` is the state of a resume; with `alike` ranks compare their first batches."""
        self._group, options = stream._group, dict(stream.options)
        world = self._group.world
        self._name, self._epoch, self._alike = type(stream.dataset).__name__, epoch, alike and world.size > 1
        self._expected, self._until = expected.get("digest"), expected.get("count", 0)
        self.draws, self._draws_here = draws, not options.get("num_workers")
        # the end of the batch that was read last, and a digest of all batches up to it
        self._stop, self._digest = 0, ""
        self.digests: dict[int, str] = {}
        self._ahead: deque[tuple[int, Batch]] = deque()
        collate = options.pop("collate_fn", None)
        options["collate_fn"] = _Shares(collate, world.rank, world.size, cuts=cuts and collate is not None)
        options["worker_init_fn"] = partial(begin_worker, options.pop("worker_init_fn", None))
        with self._drawing(), torch.device("cpu"):
            self._batches = iter(DataLoader(stream.dataset, generator=generator, **options))

    def __getitem__(self, part: slice) -> torch.Tensor:
        return torch.arange(part.start, part.stop, device="cpu")

    def _compare(self, mine: str) -> None:
        """Collective. Raise RanksDiffer where another rank's stream begins with another batch."""
        rank, self._alike = self._group.world.rank, False
        for other, theirs in enumerate(self._group.all_gather("samestep.loader's stream", mine)):
            if theirs != mine:
                raise RanksDiffer(
                    f"{self._name} gives rank {rank} other samples than rank {other}, and every rank has to "
                    "read the same stream; seed what it draws, and leave out what splits it by rank"
                )

    def stops(self, position: int) -> Iterator[int]:
        """The end positions of the batches after `position`; reads these batches."""
        while self._stop < position and self._read() is not None:
            pass
        if position and (self._stop != position or self._digest != (self._expected or self._digest)):
            raise UsageError(
                f"{self._name} gives epoch {self._epoch + 1} other samples than before the run was resumed; seed what "
                "it draws, and let each pass begin at its first sample"
            )
        while (batch := self._read()) is not None:
            self._ahead.append((self._stop, batch))
            self.digests[self._stop] = self._digest
            self.digests.pop(next(iter(self.digests)) if len(self.digests) > _KEPT_DIGESTS else -1, None)
            yield self._stop

    def batches(self, plan: Iterator[Planned], epoch: int, seed: int) -> Iterator[Batch]:
        """The planned batches; in an evaluation small batches are not planned on ranks without a share of them."""
        for positions, _ in plan:
            while self._ahead[0][0] <= positions[-1]:
                self._ahead.popleft()
            yield self._ahead.popleft()[1]

    def _read(self) -> Batch | None:
        with self._drawing():
            batch, count, mark = next(self._batches, (None, 0, ""))
        if len(self.draws.parted) == _MOST_TURNS:
            self._group.say(
                f"{self._name} draws from a random stream that the script draws from too: after {_MOST_TURNS} turns it "
                "goes on in streams of its own, so that a state stays small, and its samples are no longer the serial "
                "script's; let it draw from a generator of its own",
                what="turns",
            )
        if self._alike:
            self._compare(mark)
        self._stop += count
        self._digest = hashlib.blake2b((self._digest + mark).encode(), digest_size=8).hexdigest()
        return batch

    def _drawing(self) -> AbstractContextManager[None]:
        return self.draws.drawing(again=self._stop < self._until) if self._draws_here else nullcontext()


class _Draws:
    """The random streams that a dataset draws from where it is read in this process."""

    # By default ranks' streams differ, so a dataset has streams of its own, which go on from rank 0's. One that the
    # script has not drawn from since the last batch is the script's too. With `follows` ranks' streams are equal, and
    # all are the script's, as long as few enough were drawn from in turns.

    def __init__(self, is_scripts: bool, follows: bool, parted: list[Any]) -> None:
        """is_scripts: whether the script's streams go on behind what the dataset drew."""
        self._is_scripts, self._follows = is_scripts, follows
        self._left_at, self._count = streams.of_host(), 0
        # where the script drew between two batches: the number of the second, and the streams that it was drawn from
        self.parted = list(parted)

    @contextmanager
    def drawing(self, *, again: bool) -> Iterator[None]:
        """Context manager for one batch; with `again` repeat what was drawn for it before a resume."""
        own, follows = streams.of_host(), self._follows and self._is_scripts and not again
        follows = follows and len(self.parted) < _MOST_TURNS
        parted = [name for name in own if own[name] != self._left_at[name]]
        begun_in = own if follows else self._left_at | dict(self.parted).get(self._count, {})
        streams.set_host(begun_in)
        try:
            yield
        finally:
            self._left_at = streams.of_host()
            drawn = {name: own[name] for name in parted if self._left_at[name] != own[name]}
            if not follows:
                streams.set_host(
                    {name: own[name] for name in (parted if self._is_scripts and not again else own)}
                )
            elif drawn:
                self.parted.append((self._count, drawn))
            self._count += 1


class _Shares:
    """A collate_fn of whole batches; returns this rank's part, the number of samples, and a digest of the batch."""

    # A rank without a share gets the whole batch, since in training it takes the step too.

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
