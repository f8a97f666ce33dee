"""The order of an epoch's samples: the same on every rank, and the same again after a resume.

Without a seed the order is drawn from the script's random stream, as torch's DataLoader and RandomSampler draw it, and
rank 0's stream decides. With a seed it is a function of length, seed and epoch.
Covered: samplers and batch_samplers that draw from torch's, Python's or NumPy's stream or their own generator, that
go on from their last pass, or that have `set_epoch` or `state_dict`. Another order after a resume is an error.
"""

import hashlib
import itertools
from array import array
from collections.abc import Iterator, Sequence, Sized
from contextlib import contextmanager
from operator import index
from typing import Any, Protocol, cast

import torch

from samestep.errors import RanksDiffer, UsageError
from samestep.text import type_of
from samestep.train import streams
from samestep.train.data import share
from samestep.train.group.group import Group

# how many samples ranks ask of a sampler at once, if each asks at its own pace; most epochs are shorter
_AT_ONCE = 1 << 16


class Drawn(Protocol):
    def __getitem__(self, part: slice, /) -> torch.Tensor: ...


class Order:
    """The order of a dataset's indices, shuffled or not."""

    draws_at_iter = False

    def __init__(
        self,
        sized: Sized | None,
        seed: int | None,
        shuffle: bool,
        group: Group,
        generator: torch.Generator | None = None,
    ) -> None:
        """`sized` has the length of a pass; None where the length is known only at the end of the pass."""
        # the generator is the DataLoader's, which draws from it at the start of each pass
        self._sized, self._generator = sized, generator
        # of the latest pass: a dataset may grow from pass to pass
        self.length = self._length_now()
        self.pass_seed = seed or 0
        self._seed, self._shuffle, self._group = seed, shuffle, group
        self._expected: dict[str, Any] = {}

    def facts(self) -> dict[str, Any]:
        """The facts that determine this order, besides the options that all orders have."""
        return {"length": self._length_now()}

    def _length_now(self) -> int | None:
        return None if self._sized is None else len(self._sized)

    def count(self, batch_size: int | None, *, drop_last: bool) -> int:
        """The number of batches of a pass; raises TypeError where it is not known, as torch's DataLoader does."""
        full, rest = divmod(self._samples(), batch_size or 1)
        return full + (rest > 0 and not drop_last)

    def _samples(self) -> int:
        return self._length_now() or 0

    def begin(self, *, again: bool) -> None:
        """Begin a pass: draw what a new iterator of torch's DataLoader draws; with `again` the iterator is kept."""
        # Collective where the length has changed since the last pass.
        if self.length != (length := self._expected.get("length", self._length_now())):
            self.length = length
            for rank, theirs in enumerate(self._group.all_gather("samestep.loader's length", length)):
                if theirs != length:
                    raise RanksDiffer(
                        f"the data of a loader has {length} samples on rank {self._group.world.rank} and {theirs} on "
                        f"rank {rank}; add the same samples on every rank: samestep.gather collects what ranks made"
                    )
        if self._seed is None and not self._expected and not again:
            streams.draw_seed(self._generator)

    def draw(self, epoch: int, *, alike: bool, lazily: bool) -> "Drawn":
        """The samples of this epoch. Collective where the order is drawn, and with `alike`: ranks compare it."""
        # With `lazily` a sampler draws from the script's stream when it is asked; ranks' streams are equal then.
        expected, self._expected = self._expected, {}
        if self._seed is None and self._shuffle:
            # as torch's RandomSampler draws it; all ranks draw, so that their streams stay equal
            self.pass_seed = expected.get("seed") or int(
                self._group.broadcast("samestep.loader's next pass", streams.draw_seed())
            )
            generator = torch.Generator().manual_seed(self.pass_seed)
            return torch.randperm(self.length or 0, generator=generator, device="cpu")
        return share.order(self.length or 0, self._seed or 0, epoch, self._shuffle)

    def kept(self, position: int) -> dict[str, Any]:
        """The state from which `go_on` restores this order; after `go_on` that of the order still to be drawn."""
        if self._expected:
            return {"order": self._expected}
        state = self.state(position)
        if self.length == self._length_now():
            return state
        return {"order": {**state.get("order", {}), "length": self.length}}

    def state(self, position: int) -> dict[str, Any]:
        """The state from which `go_on` restores the latest order."""
        if self._seed is None and self._shuffle:
            return {"order": {"seed": self.pass_seed}}
        return {"order": {"drawn": True}} if self._seed is None else {}

    def go_on(self, state: dict[str, Any]) -> None:
        """Draw the order of this state next."""
        self._expected = state.get("order", {})

    def skip(self, epoch: int) -> None:
        """Draw the order of a resumed pass that was left before its first batch."""
        if self._expected:
            self.draw(epoch, alike=False, lazily=False)


class Sampled(Order):
    kind = "sampler"

    def __init__(
        self, sampler: Any, seed: int | None, group: Group, generator: torch.Generator | None = None
    ) -> None:
        super().__init__(self._sized_of(sampler), seed, shuffle=False, group=group, generator=generator)
        self.sampler = sampler
        # a sampler without a length may depend on what the loop collects, as a replay memory does
        self.at_once = _AT_ONCE if hasattr(sampler, "__len__") else 1
        self._passes = 0
        self._epoch_known = getattr(sampler, "epoch", None)
        self._begun_in: dict[str, Any] = {}
        self._taken: Taken | None = None

    def _sized_of(self, sampler: Any) -> Sized | None:
        if not hasattr(sampler, "__len__"):
            raise UsageError(
                f"loader got a sampler, {type(sampler).__name__}, without length; give it a __len__"
            )
        return cast(Sized, sampler)

    def draw(self, epoch: int, *, alike: bool, lazily: bool) -> "Taken":
        expected, self._expected = self._expected, {}
        drawn_in = expected.get("drawn_in")
        if "before" in expected:
            self.sampler.load_state_dict(expected["before"])
        elif expected:
            # bring a sampler that continues from its last pass to where it was
            while self._passes < epoch:
                self._take(self._passes, drawn_in, self.length)
        lazily = lazily and self._seed is None
        if lazily and not expected:
            drawn_in = {"streams": streams.capture(), "generator": _state_of(self._own_generator())}
            taken = self._begin(epoch, drawn_in)
        else:
            # samples not asked for before the resume are drawn from the streams as they are now
            asked = expected.get("asked", self.length if lazily else self.at_once)
            taken = self._take(epoch, drawn_in, asked, goes_on=not lazily)
        if expected and _digest(taken[: expected["count"]]) != expected["digest"]:
            raise UsageError(
                f"the {self.kind} gives epoch {epoch + 1} another order than before the run was resumed; make the "
                "order a function of its seed and epoch, or give the sampler a state_dict"
            )
        if alike and self._group.world.size > 1:
            taken.compare_first()
        return taken

    def state(self, position: int) -> dict[str, Any]:
        if self._taken is None:
            return {}
        consumed = self._taken[:position]
        counts = {"count": len(consumed), "asked": self._taken.asked}
        return {"order": {"digest": _digest(consumed), **counts, **self._begun_in}}

    def _take(
        self, epoch: int, drawn_in: dict[str, Any] | None, count: int | None, *, goes_on: bool = False
    ) -> "Taken":
        """A pass of the sampler up to `count` samples, drawn from `drawn_in`, the seed or rank 0's stream."""
        with self._drawing(epoch, drawn_in) as drawn_in:
            taken = self._begin(epoch, drawn_in)
            taken.take(count)
            taken.left_at = streams.capture() if goes_on else None
        return taken

    def _begin(self, epoch: int, drawn_in: dict[str, Any]) -> "Taken":
        self._begun_in = {"drawn_in": drawn_in}
        is_set_by_script = getattr(self.sampler, "epoch", None) != self._epoch_known
        if hasattr(self.sampler, "set_epoch") and not is_set_by_script:
            self.sampler.set_epoch(epoch)
        self._epoch_known = getattr(self.sampler, "epoch", None)
        if hasattr(self.sampler, "state_dict") and hasattr(self.sampler, "load_state_dict"):
            self._begun_in["before"] = self.sampler.state_dict()
        self._passes += 1
        self._taken = self._new_taken()
        return self._taken

    def _new_taken(self) -> "Taken":
        return Taken(self, iter(self.sampler), self._group)

    def _own_generator(self) -> torch.Generator | None:
        samplers = (self.sampler, getattr(self.sampler, "sampler", None))
        generators = (getattr(sampler, "generator", None) for sampler in samplers)
        return next((generator for generator in generators if isinstance(generator, torch.Generator)), None)

    @contextmanager
    def _drawing(self, epoch: int, drawn_in: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
        """Context manager: set the streams that the sampler draws from; only rank 0's own streams advance by it."""
        own, generator = streams.capture(), self._own_generator()
        changed = None
        if self._seed is not None:
            drawn_in = {}
            streams.draw_as("sampler", self._seed, epoch)
            if generator is not None:
                generator.manual_seed(streams.seed_of("sampler", self._seed, epoch))
        elif drawn_in:
            streams.restore(drawn_in["streams"])
            if generator is not None:
                generator.set_state(torch.frombuffer(bytearray(drawn_in["generator"]), dtype=torch.uint8))
        else:
            first = self._group.broadcast("samestep.loader's sampler draws", own)
            drawn_in = {"streams": first, "generator": _state_of(generator)}
            streams.restore(first)
            changed = streams.different(first, own)
        try:
            yield drawn_in
        finally:
            streams.restore(own, changed)


class Batched(Sampled):
    """The batches of the user's batch_sampler, of any sizes."""

    kind, draws_at_iter = "batch_sampler", True

    def __init__(
        self,
        sampler: Any,
        seed: int | None,
        group: Group,
        generator: torch.Generator | None,
        *,
        has_workers: bool,
    ) -> None:
        super().__init__(sampler, seed, group, generator)
        self._has_workers, self._is_again = has_workers, False

    def facts(self) -> dict[str, Any]:
        return {}

    def count(self, batch_size: int | None, *, drop_last: bool) -> int:
        return len(self.sampler)

    def begin(self, *, again: bool) -> None:
        self._is_again = again

    def _sized_of(self, sampler: Any) -> None:
        return None

    def _new_taken(self) -> "TakenBatches":
        # torch's DataLoader draws a seed after it has made the iterator, and for new workers it makes another iterator
        iterator = iter(self.sampler)
        if self._seed is None and not self._is_again:
            streams.draw_seed(self._generator)
            iterator = iter(self.sampler) if self._has_workers else iterator
        return TakenBatches(self, iterator, self._group)


class Taken:
    """An order that is read from a sampler when it is needed, as torch's DataLoader does."""

    def __init__(self, of: Sampled, iterator: Iterator[Any], group: Group) -> None:
        self._is_to_compare = False
        self._compared, self._at_once = 0, of.at_once
        # the state of the streams that the sampler draws on from; None where it draws from the script's streams
        self.left_at: bytes | None = None
        self._name, self._length = f"the {of.kind}, {type(of.sampler).__name__},", of.length
        self._iterator, self._group = iterator, group
        self._indices = array("q")

    def __getitem__(self, part: slice) -> torch.Tensor:
        self.ask(part.stop)
        if self._is_to_compare:
            self._compare()
        return torch.tensor(self._indices[part], dtype=torch.int64, device="cpu")

    @property
    def asked(self) -> int:
        return len(self._indices)

    def ask(self, stop: int) -> None:
        """Read the samples up to `stop`, from the streams that the sampler draws from."""
        if stop <= self.asked:
            return
        if self.left_at is None:
            return self.take(stop)
        own = streams.capture()
        # a stream that the script has not drawn from since is shared by the sampler and the script, as serially
        changed = streams.different(own, self.left_at)
        streams.restore(self.left_at)
        self.take(max(stop, self.asked + self._at_once))
        self.left_at = streams.capture()
        streams.restore(own, changed)

    def take(self, stop: int | None) -> None:
        """Read the samples up to `stop`, and at the end all that are left."""
        length = self._length or 0
        stop = min(stop or 0, length)
        is_end = stop == length
        drawn = list(itertools.islice(self._iterator, None if is_end else stop - len(self._indices)))
        self._add(drawn, "pass batches as batch_sampler=")
        count = len(self._indices)
        if count < stop or (is_end and count != self._length):
            raise UsageError(
                f"{self._name} yielded {count} samples but its len() is {self._length}; make them agree"
            )

    def _add(self, drawn: Sequence[Any], remedy: str) -> None:
        try:
            self._indices.extend(map(index, drawn))
        except TypeError as error:
            raise UsageError(
                f"{self._name} yielded {type_of(drawn[0])}, which is not the index of a sample; let it yield "
                f"integers, or {remedy}"
            ) from error

    def compare_first(self) -> None:
        """Collective. Compare the samples read so far with the other ranks, or else the first that will be read."""
        self._is_to_compare = True
        if self._indices:
            self._compare()

    def end(self) -> None:
        """Collective. Read the samples that are left, as torch does where it drops the last batch, which a sampler may
        draw after; compare those read since the first comparison, as a sampler may depend on the losses."""
        self.ask(self._length or 0)
        if 0 < self._compared < self.asked and self.left_at is not None:
            self._compare()

    def _compare(self) -> None:
        """Collective. Raise RanksDiffer where another rank's sampler gave another order."""
        self._is_to_compare, self._compared = False, self.asked
        mine = _digest(torch.tensor(self._indices, device="cpu"))
        for other, digest in enumerate(self._group.all_gather("samestep.loader's sampler", mine)):
            if digest != mine:
                raise RanksDiffer(
                    f"{self._name} gives rank {self._group.world.rank} another order than rank {other}, and all ranks "
                    "share one order; leave out a sampler that chooses by rank, and give another the same seed and the "
                    "same weights on all ranks"
                )


class TakenBatches(Taken):
    def __init__(self, of: Sampled, iterator: Iterator[Any], group: Group) -> None:
        super().__init__(of, iterator, group)
        self._stops: list[int] = []

    def stops(self, position: int) -> Iterator[int]:
        """The end positions of the batches after `position`."""
        for number in itertools.count():
            if number == len(self._stops):
                self.ask(self.asked + 1)
            if number == len(self._stops):
                return
            if self._stops[number] > position:
                yield self._stops[number]

    def take(self, stop: int | None) -> None:
        """Read batches up to the sample `stop`, or all."""
        while stop is None or self.asked < stop:
            batch = next(self._iterator, None)
            if batch is None:
                return
            if not hasattr(batch, "__len__") or not len(batch):
                raise UsageError(
                    f"{self._name} yielded {batch!r}, which is not a batch; let it yield lists of indices, or pass it "
                    "as sampler="
                )
            self._add(batch, "let it yield lists of them")
            self._stops.append(self.asked)


def _digest(order: torch.Tensor) -> str:
    return hashlib.blake2b(order.numpy().tobytes(), digest_size=8).hexdigest()


def _state_of(generator: torch.Generator | None) -> bytes | None:
    return None if generator is None else generator.get_state().numpy().tobytes()
