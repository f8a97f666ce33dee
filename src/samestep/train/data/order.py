"""In which order the samples of an epoch come, alike on every rank, and found again after a resume.

Covered: a sampler that draws from torch's, Python's or NumPy's stream or a generator of its own, one that goes
on from its last pass, one with `set_epoch`, one with a `state_dict`. Another order than before is an error.
"""

import hashlib
from operator import index
from typing import Any

import torch

from samestep.errors import RanksDiffer, UsageError
from samestep.train import streams
from samestep.train.data import share
from samestep.train.group.world import joined


class Order:
    """The order of a function of (length, seed, epoch)."""

    def __init__(self, length: int, seed: int, shuffle: bool) -> None:
        self.length = length
        self._seed = seed
        self._shuffle = shuffle

    def draw(self, epoch: int, *, alike: bool) -> torch.Tensor:
        """The samples of this epoch; collective where they have to be `alike` on all ranks."""
        return share.order(self.length, self._seed, epoch, self._shuffle)

    def state(self) -> dict[str, Any]:
        """What brings back the order drawn last."""
        return {}

    def go_on(self, state: dict[str, Any]) -> None:
        """Let the next order drawn be the one of this state."""


class Sampled(Order):
    """The order of a sampler of the user's own."""

    def __init__(self, sampler: Any, seed: int) -> None:
        if not hasattr(sampler, "__len__"):
            raise UsageError(
                f"loader got a sampler, {type(sampler).__name__}, without length; give it a __len__"
            )
        super().__init__(len(sampler), seed, shuffle=False)
        self._sampler = sampler
        self._passes = 0
        self._before: Any = None
        self._digest = ""
        self._expected: dict[str, Any] = {}

    def draw(self, epoch: int, *, alike: bool) -> torch.Tensor:
        expected, self._expected = self._expected, {}
        if "before" in expected:
            self._sampler.load_state_dict(expected["before"])
        elif expected:
            # one that goes on from its last pass is now where it was
            while self._passes < epoch:
                self._pass(self._passes)
        drawn = self._pass(epoch)
        if expected and self._digest != expected["digest"]:
            raise UsageError(
                f"the sampler gives epoch {epoch} another order than the one its first "
                "samples were taken in; make it a function of its seed and epoch, or give it a state_dict"
            )
        if alike:
            self._compare()
        return drawn

    def _compare(self) -> None:
        name = type(self._sampler).__name__
        group = joined()
        for rank, digest in enumerate(group.all_gather("samestep.loader's sampler", self._digest.encode())):
            if digest.decode() != self._digest:
                raise RanksDiffer(
                    f"the sampler, {name}, gives rank {group.world.rank} another order than rank {rank}, and samestep "
                    "shares the batches of one order; leave it out where it chooses by rank, else seed it alike"
                )

    def state(self) -> dict[str, Any]:
        if not self._digest:
            return {}
        before = {} if self._before is None else {"before": self._before}
        return {"order": {"digest": self._digest, **before}}

    def go_on(self, state: dict[str, Any]) -> None:
        self._expected = state.get("order", {})

    def _pass(self, epoch: int) -> torch.Tensor:
        streams_before = streams.capture()
        try:
            streams.draw_as("sampler", self._seed, epoch)
            if isinstance(own := getattr(self._sampler, "generator", None), torch.Generator):
                own.manual_seed(streams.seed_of("sampler", self._seed, epoch))
            if hasattr(self._sampler, "set_epoch"):
                self._sampler.set_epoch(epoch)
            if hasattr(self._sampler, "state_dict") and hasattr(self._sampler, "load_state_dict"):
                self._before = self._sampler.state_dict()
            drawn = self._as_order(list(self._sampler))
        finally:
            streams.restore(streams_before)
        self._passes += 1
        self._digest = hashlib.blake2b(drawn.numpy().tobytes(), digest_size=8).hexdigest()
        return drawn

    def _as_order(self, drawn: list[Any]) -> torch.Tensor:
        name = type(self._sampler).__name__
        if len(drawn) != self.length:
            raise UsageError(
                f"the sampler, {name}, gave {len(drawn)} samples and says {self.length}, of which batches are "
                "made; let its __len__ say what it gives"
            )
        try:
            return torch.tensor([index(one) for one in drawn], dtype=torch.int64)
        except TypeError as error:
            raise UsageError(
                f"the sampler, {name}, gave a {type(drawn[0]).__name__}, no index of one sample; let it give whole "
                "numbers, of which batches are made here"
            ) from error
