"""In which order the samples of an epoch come, alike on every rank, and found again after a resume.

Without a seed the order comes from the script's own random stream, as torch's DataLoader and RandomSampler draw it;
rank 0's stream decides. With a seed it is a function of length, seed and epoch.
Covered: a sampler that draws from torch's, Python's or NumPy's stream or a generator of its own, one that goes
on from its last pass, one with `set_epoch`, one with a `state_dict`. Another order than before is an error.
"""

import hashlib
import itertools
from collections.abc import Collection, Iterator
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

    def draw(self, epoch: int, *, alike: bool, lazily: bool = False) -> "torch.Tensor | Lazy":
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


class Lazy:
    """An order that is taken from a sampler as far as it is asked for, as torch's DataLoader takes it."""

    def __init__(self, of: "Sampled", iterator: Iterator[Any], *, alike: bool) -> None:
        self._of, self._iterator, self._alike = of, iterator, alike
        self._taken: list[int] = []

    def __getitem__(self, part: slice) -> torch.Tensor:
        missing = part.stop - len(self._taken)
        if missing > 0:
            self._taken += self._of.as_indices(list(itertools.islice(self._iterator, missing)))
            if part.stop >= self._of.length:
                self._taken += self._of.as_indices(list(self._iterator))
                self._of.check_length(len(self._taken))
            self._of.check_length(len(self._taken), at_least=part.stop)
        if self._alike:
            self._alike = False
            self._of.compare(_digest(torch.tensor(self._taken, device="cpu")))
        return torch.tensor(self._taken[part], dtype=torch.int64, device="cpu")

    def first(self, count: int) -> torch.Tensor:
        """The first samples, as far as they were taken."""
        return torch.tensor(self._taken[:count], dtype=torch.int64, device="cpu")


class Sampled(Order):
    """The order of a sampler of the user's own."""

    def __init__(self, sampler: Any, seed: int | None, group: Group) -> None:
        if not hasattr(sampler, "__len__"):
            raise UsageError(
                f"loader got a sampler, {type(sampler).__name__}, without length; give it a __len__"
            )
        super().__init__(len(sampler), seed, shuffle=False, group=group)
        self._sampler = sampler
        self._passes = 0
        self._before: Any = None
        self._drawn_in: dict[str, Any] = {}
        self._drawn: torch.Tensor | Lazy | None = None

    def draw(self, epoch: int, *, alike: bool, lazily: bool = False) -> torch.Tensor | Lazy:
        expected, self._expected = self._expected, {}
        if self._seed is None and not expected and lazily:
            return self._begin(epoch, alike=alike)
        if "before" in expected:
            self._sampler.load_state_dict(expected["before"])
        elif expected:
            # a sampler that goes on from its last pass is now where it was
            while self._passes < epoch:
                self._pass(self._passes, expected["drawn_in"])
        drawn = self._pass(epoch, expected.get("drawn_in"))
        if expected and _digest(drawn[: expected["count"]]) != expected["digest"]:
            raise UsageError(
                f"the sampler gives epoch {epoch} another order than before the run was resumed; make the order a "
                "function of its seed and epoch, or give the sampler a state_dict"
            )
        if alike:
            self.compare(_digest(drawn))
        return drawn

    def _begin(self, epoch: int, *, alike: bool) -> Lazy:
        """The sampler is taken as torch's DataLoader does: what it draws is drawn in between."""
        self._drawn_in = {"streams": streams.capture(), "generator": _state_of(self._own_generator())}
        self._begin_epoch(epoch)
        self._passes += 1
        self._drawn = Lazy(self, iter(self._sampler), alike=alike)
        return self._drawn

    def compare(self, mine: str) -> None:
        """Collective. Raise RanksDiffer where another rank's sampler gave another order than this digest's."""
        if self._group.world.size == 1:
            return
        name, rank = type(self._sampler).__name__, self._group.world.rank
        for other, digest in enumerate(self._group.all_gather("samestep.loader's sampler", mine.encode())):
            if digest.decode() != mine:
                raise RanksDiffer(
                    f"the sampler, {name}, gives rank {rank} another order than rank {other}, and all ranks share one "
                    "order; leave out a sampler that chooses by rank, or seed it alike on all ranks"
                )

    def state(self, position: int) -> dict[str, Any]:
        if self._drawn is None:
            return {}
        before = {} if self._before is None else {"before": self._before}
        taken = self._drawn.first(position) if isinstance(self._drawn, Lazy) else self._drawn[:position]
        facts = {"digest": _digest(taken), "count": len(taken), "drawn_in": self._drawn_in}
        return {"order": {**facts, **before}}

    def _pass(self, epoch: int, drawn_in: dict[str, Any] | None = None) -> torch.Tensor:
        """One pass of the sampler; without a seed it draws from rank 0's stream, as that is or was."""
        own = streams.capture()
        brought_back = self._take_streams(epoch, own, drawn_in or {})
        try:
            self._begin_epoch(epoch)
            drawn = self.as_indices(list(self._sampler))
        finally:
            streams.restore(own, brought_back)
        self.check_length(len(drawn))
        self._passes += 1
        order = self._drawn = torch.tensor(drawn, dtype=torch.int64, device="cpu")
        return order

    def _begin_epoch(self, epoch: int) -> None:
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)
        if hasattr(self._sampler, "state_dict") and hasattr(self._sampler, "load_state_dict"):
            self._before = self._sampler.state_dict()

    def _own_generator(self) -> torch.Generator | None:
        generator = getattr(self._sampler, "generator", None)
        return generator if isinstance(generator, torch.Generator) else None

    def _take_streams(self, epoch: int, own: bytes, drawn_in: dict[str, Any]) -> Collection[str] | None:
        """Set the streams that the sampler draws from; which of this rank's own do not go on by that (None: all)."""
        generator = self._own_generator()
        if self._seed is not None:
            streams.draw_as("sampler", self._seed, epoch)
            if generator is not None:
                generator.manual_seed(streams.seed_of("sampler", self._seed, epoch))
            return None
        if drawn_in:
            streams.restore(drawn_in["streams"])
            if generator is not None:
                generator.set_state(torch.frombuffer(bytearray(drawn_in["generator"]), dtype=torch.uint8))
            self._drawn_in = drawn_in
            return None
        first = self._group.broadcast("samestep.loader's sampler draws", own)
        self._drawn_in = {"streams": first, "generator": _state_of(generator)}
        streams.restore(first)
        return streams.different(first, own)

    def check_length(self, count: int, *, at_least: int | None = None) -> None:
        """Whether the sampler has yielded as many samples as its len() says."""
        if count != self.length if at_least is None else count < at_least:
            raise UsageError(
                f"the sampler, {type(self._sampler).__name__}, yielded {count} samples but its len() is "
                f"{self.length}; make them agree"
            )

    def as_indices(self, drawn: list[Any]) -> list[int]:
        """What the sampler yielded, as whole numbers."""
        try:
            return [index(one) for one in drawn]
        except TypeError as error:
            raise UsageError(
                f"the sampler, {type(self._sampler).__name__}, yielded a {type(drawn[0]).__name__}, which is not the "
                "index of a sample; let it yield integers, and the loader makes batches of them"
            ) from error


def _digest(order: torch.Tensor) -> str:
    return hashlib.blake2b(order.numpy().tobytes(), digest_size=8).hexdigest()


def _state_of(generator: torch.Generator | None) -> bytes:
    return b"" if generator is None else generator.get_state().numpy().tobytes()
