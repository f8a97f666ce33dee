"""In which order the samples of an epoch come, alike on every rank, and found again after a resume.

Without a seed the order comes from the script's own random stream, as torch's DataLoader and RandomSampler draw it;
rank 0's stream decides. With a seed it is a function of length, seed and epoch.
Covered: a sampler that draws from torch's, Python's or NumPy's stream or a generator of its own, one that goes
on from its last pass, one with `set_epoch`, one with a `state_dict`. Another order than before is an error.
"""

import hashlib
from collections.abc import Collection
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

    def draw(self, epoch: int, *, alike: bool) -> torch.Tensor:
        """The samples of this epoch; collective where it is drawn, and where it has to be `alike` on all ranks."""
        expected, self._expected = self._expected, {}
        if self._seed is None and self._shuffle:
            self.pass_seed = expected.get("seed") or self._drawn_seed()
            generator = torch.Generator().manual_seed(self.pass_seed)
            return torch.randperm(self.length, generator=generator)
        return share.order(self.length, self._seed or 0, epoch, self._shuffle)

    def _drawn_seed(self) -> int:
        """As torch's RandomSampler draws it; all ranks draw, so that their streams stay in step."""
        drawn = streams.draw_seed()
        return int(self._group.all_gather("samestep.loader's order", str(drawn).encode())[0])

    def state(self) -> dict[str, Any]:
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
        self._sampler = sampler
        self._passes = 0
        self._before: Any = None
        self._drawn_in: dict[str, Any] = {}
        self._digest = ""

    def draw(self, epoch: int, *, alike: bool) -> torch.Tensor:
        expected, self._expected = self._expected, {}
        if "before" in expected:
            self._sampler.load_state_dict(expected["before"])
        elif expected:
            # a sampler that goes on from its last pass is now where it was
            while self._passes < epoch:
                self._pass(self._passes, expected["drawn_in"])
        drawn = self._pass(epoch, expected.get("drawn_in"))
        if expected and self._digest != expected["digest"]:
            raise UsageError(
                f"the sampler gives epoch {epoch} another order than before the run was resumed; make the order a "
                "function of its seed and epoch, or give the sampler a state_dict"
            )
        if alike:
            self._compare()
        return drawn

    def _compare(self) -> None:
        name, rank = type(self._sampler).__name__, self._group.world.rank
        digests = self._group.all_gather("samestep.loader's sampler", self._digest.encode())
        for other, digest in enumerate(digests):
            if digest.decode() != self._digest:
                raise RanksDiffer(
                    f"the sampler, {name}, gives rank {rank} another order than rank {other}, and all ranks share one "
                    "order; leave out a sampler that chooses by rank, or seed it alike on all ranks"
                )

    def state(self) -> dict[str, Any]:
        if not self._digest:
            return {}
        before = {} if self._before is None else {"before": self._before}
        return {"order": {"digest": self._digest, "drawn_in": self._drawn_in, **before}}

    def _pass(self, epoch: int, drawn_in: dict[str, Any] | None = None) -> torch.Tensor:
        """One pass of the sampler; without a seed it draws from rank 0's stream, as that is or was."""
        own = streams.capture()
        brought_back = self._take_streams(epoch, own, drawn_in or {})
        try:
            if hasattr(self._sampler, "set_epoch"):
                self._sampler.set_epoch(epoch)
            if hasattr(self._sampler, "state_dict") and hasattr(self._sampler, "load_state_dict"):
                self._before = self._sampler.state_dict()
            drawn = self._as_order(list(self._sampler))
        finally:
            streams.restore(own, brought_back)
        self._passes += 1
        self._digest = hashlib.blake2b(drawn.numpy().tobytes(), digest_size=8).hexdigest()
        return drawn

    def _take_streams(self, epoch: int, own: bytes, drawn_in: dict[str, Any]) -> Collection[str]:
        """Set the streams that the sampler draws from; which of this rank's own do not go on by that."""
        generator = getattr(self._sampler, "generator", None)
        if not isinstance(generator, torch.Generator):
            generator = None
        if self._seed is not None:
            streams.draw_as("sampler", self._seed, epoch)
            if generator is not None:
                generator.manual_seed(streams.seed_of("sampler", self._seed, epoch))
            return streams.NAMES
        if drawn_in:
            streams.restore(drawn_in["streams"])
            if generator is not None:
                generator.set_state(torch.frombuffer(bytearray(drawn_in["generator"]), dtype=torch.uint8))
            self._drawn_in = drawn_in
            return streams.NAMES
        first = self._group.all_gather("samestep.loader's sampler draws", own)[0]
        state = b"" if generator is None else generator.get_state().numpy().tobytes()
        self._drawn_in = {"streams": first, "generator": state}
        streams.restore(first)
        return streams.different(first, own)

    def _as_order(self, drawn: list[Any]) -> torch.Tensor:
        name = type(self._sampler).__name__
        if len(drawn) != self.length:
            raise UsageError(
                f"the sampler, {name}, yielded {len(drawn)} samples but its len() is {self.length}; make them agree"
            )
        try:
            return torch.tensor([index(one) for one in drawn], dtype=torch.int64)
        except TypeError as error:
            raise UsageError(
                f"the sampler, {name}, yielded a {type(drawn[0]).__name__}, which is not the index of a sample; let it "
                "yield integers, and the loader makes batches of them"
            ) from error
