"""In which order the samples of an epoch come, alike on every rank, and found again after a resume.

Without a seed the order comes from the script's own random stream, as torch's DataLoader and RandomSampler draw it;
rank 0's stream decides. With a seed it is a function of length, seed and epoch.
Covered: a sampler that draws from torch's, Python's or NumPy's stream or a generator of its own, one that goes
on from its last pass, one with `set_epoch`, one with a `state_dict`. Another order than before is an error.
"""

import hashlib
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from operator import index
from typing import Any

import torch

from samestep.errors import RanksDiffer, UsageError
from samestep.train import streams
from samestep.train.data import share
from samestep.train.group.group import Group


class Order:
    """The order of a data set itself, shuffled or not."""

    def __init__(self, length: int, seed: int | None, shuffle: bool, group: Group) -> None:
        self.length = length
        self.pass_seed = seed or 0
        self._seed, self._shuffle, self._group = seed, shuffle, group
        self._expected: dict[str, Any] = {}

    def begin(self, *, again: bool) -> None:
        """A pass begins: draw what a new iterator of torch's DataLoader draws; `again` is one that is kept."""
        if self._seed is None and not self._expected and not again:
            streams.draw_seed()

    def draw(self, epoch: int, *, alike: bool, lazily: bool = False) -> "torch.Tensor | Taken":
        """The samples of this epoch; collective where it is drawn, and where it has to be `alike` on all ranks.

        With `lazily`, ranks whose random streams are alike take a sampler as far as they need it.
        """
        expected, self._expected = self._expected, {}
        if self._seed is None and self._shuffle:
            self.pass_seed = expected.get("seed") or self._drawn_seed()
            generator = torch.Generator().manual_seed(self.pass_seed)
            return torch.randperm(self.length, generator=generator, device="cpu")
        return share.order(self.length, self._seed or 0, epoch, self._shuffle)

    def _drawn_seed(self) -> int:
        """As torch's RandomSampler draws it; all ranks draw, so that their streams stay in step."""
        drawn = streams.draw_seed()
        return int(self._group.broadcast("samestep.loader's order", str(drawn).encode()))

    def state(self, position: int) -> dict[str, Any]:
        """What brings back the order drawn last."""
        if self._seed is None and self._shuffle:
            return {"order": {"seed": self.pass_seed}}
        return {"order": {"drawn": True}} if self._seed is None else {}

    def go_on(self, state: dict[str, Any]) -> None:
        """Let the next order drawn be the one of this state."""
        self._expected = state.get("order", {})


class Sampled(Order):
    """The order of a sampler of the user's own."""

    def __init__(self, sampler: Any, seed: int | None, group: Group) -> None:
        if not hasattr(sampler, "__len__"):
            raise UsageError(
                f"loader got a sampler, {type(sampler).__name__}, without length; give it a __len__"
            )
        super().__init__(len(sampler), seed, shuffle=False, group=group)
        self.sampler = sampler
        self._passes = 0
        self._begun_in: dict[str, Any] = {}
        self._taken: Taken | None = None

    def draw(self, epoch: int, *, alike: bool, lazily: bool = False) -> "Taken":
        expected, self._expected = self._expected, {}
        drawn_in = expected.get("drawn_in")
        if "before" in expected:
            self.sampler.load_state_dict(expected["before"])
        elif expected:
            # a sampler that goes on from its last pass is now where it was
            while self._passes < epoch:
                self._take(self._passes, drawn_in, self.length)
        lazily = lazily and self._seed is None
        if lazily and not expected:
            drawn_in = {"streams": streams.capture(), "generator": _state_of(self._own_generator())}
            taken = self._begin(epoch, drawn_in)
        else:
            # what was not asked for before the resume is drawn from the streams as they are now
            asked = expected.get("asked", self.length) if lazily else self.length
            taken = self._take(epoch, drawn_in, asked)
        if expected and _digest(taken[: expected["count"]]) != expected["digest"]:
            raise UsageError(
                f"the sampler gives epoch {epoch} another order than before the run was resumed; make the order a "
                "function of its seed and epoch, or give the sampler a state_dict"
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

    def _take(self, epoch: int, drawn_in: dict[str, Any] | None, count: int) -> "Taken":
        """A pass of the sampler, up to this sample; without a seed it draws from rank 0's stream, as that is or was."""
        with self._drawing(epoch, drawn_in) as drawn_in:
            taken = self._begin(epoch, drawn_in)
            taken.take(count)
        return taken

    def _begin(self, epoch: int, drawn_in: dict[str, Any]) -> "Taken":
        self._begun_in = {"drawn_in": drawn_in}
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)
        if hasattr(self.sampler, "state_dict") and hasattr(self.sampler, "load_state_dict"):
            self._begun_in["before"] = self.sampler.state_dict()
        self._passes += 1
        self._taken = Taken(self, self._group)
        return self._taken

    def _own_generator(self) -> torch.Generator | None:
        generator = getattr(self.sampler, "generator", None)
        return generator if isinstance(generator, torch.Generator) else None

    @contextmanager
    def _drawing(self, epoch: int, drawn_in: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
        """Meanwhile the streams are those that the sampler draws from; of the rank's own only rank 0's go on by it."""
        own, generator = streams.capture(), self._own_generator()
        brought_back = None
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
            brought_back = streams.different(first, own)
        try:
            yield drawn_in
        finally:
            streams.restore(own, brought_back)


class Taken:
    """An order that is taken from a sampler as far as it is asked for, as torch's DataLoader takes it."""

    def __init__(self, of: Sampled, group: Group) -> None:
        self._is_to_compare = False
        self._name, self._length = f"the sampler, {type(of.sampler).__name__},", of.length
        self._iterator, self._group = iter(of.sampler), group
        self._indices: list[int] = []

    def __getitem__(self, part: slice) -> torch.Tensor:
        if part.stop > len(self._indices):
            self.take(part.stop)
        if self._is_to_compare:
            self._compare()
        return torch.tensor(self._indices[part], dtype=torch.int64, device="cpu")

    @property
    def asked(self) -> int:
        """How many samples the sampler was asked for."""
        return len(self._indices)

    def take(self, stop: int) -> None:
        """Ask the sampler for its samples up to this one, and at the end for all."""
        is_end = stop >= self._length
        drawn = list(itertools.islice(self._iterator, None if is_end else stop - len(self._indices)))
        try:
            self._indices += map(index, drawn)
        except TypeError as error:
            raise UsageError(
                f"{self._name} yielded a {type(drawn[0]).__name__}, which is not the index of a sample; let it yield "
                "integers, and the loader makes batches of them"
            ) from error
        count = len(self._indices)
        if count < stop or (is_end and count != self._length):
            raise UsageError(
                f"{self._name} yielded {count} samples but its len() is {self._length}; make them agree"
            )

    def compare_first(self) -> None:
        """Collective. Compare what was taken with the other ranks, or else what will be taken first."""
        self._is_to_compare = True
        if self._indices:
            self._compare()

    def _compare(self) -> None:
        """Collective. Raise RanksDiffer where another rank's sampler gave another order."""
        self._is_to_compare = False
        mine = _digest(torch.tensor(self._indices, device="cpu"))
        for other, digest in enumerate(self._group.all_gather("samestep.loader's sampler", mine.encode())):
            if digest.decode() != mine:
                raise RanksDiffer(
                    f"{self._name} gives rank {self._group.world.rank} another order than rank {other}, and all ranks "
                    "share one order; leave out a sampler that chooses by rank, or seed it alike on all ranks"
                )


def _digest(order: torch.Tensor) -> str:
    return hashlib.blake2b(order.numpy().tobytes(), digest_size=8).hexdigest()


def _state_of(generator: torch.Generator | None) -> bytes:
    return b"" if generator is None else generator.get_state().numpy().tobytes()
