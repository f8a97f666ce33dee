"""The spine: where a pass, a step and a microbatch begin and end, and which of their samples are this rank's.

`loader` and `steps` publish here. Replicas, their comparison, the meter and the random draws subscribe. Neither data/
nor model/ imports the other; both import this module.
"""

import struct
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from samestep.errors import RanksDiffer
from samestep.text import name_ranks
from samestep.train.group.control import users_line
from samestep.train.group.group import Group, Member
from samestep.train.group.world import joined
from samestep.train.loss import Averaged
from samestep.train.nested import memory_of, named_tensors
from samestep.train.passes import Pass, Ragged, Share
from samestep.train.subscriber import Models, Subscriber

_MOST_PASSES = 8
_POSITION = struct.Struct("<HHI")


class Spine(Member):
    """Holds the unfinished passes of this process, and the batch that was handed out last."""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self.steps = self.batches = self.inside_model = self.totals = 0
        self.models = Models()
        self.is_reading = False
        # the running backward's factor of the loss, and the factor that gradients of leaves such as x.grad should have
        self.loss_weight = self.leaf_weight = 1.0
        self.needs_leaf_weight = False
        # the weights of replicas' calls since the last backward
        self.call_weights: set[float] = set()
        # how the latest loss depends on averages, if that was followed, and the line that reads a number that weighs it
        self.loss: Averaged | None = None
        self.weighed_by = ""
        self._subscribers: list[Subscriber] = []
        self._passes: list[Pass] = []
        # by id: the tensors of batches that are still in memory, with the batch's share
        self._shares: dict[int, tuple[weakref.ref[torch.Tensor], Share]] = {}
        self._joined = weakref.WeakValueDictionary[int, torch.Tensor]()
        self._worked_on: Share | None = None
        self._left: Pass | None = None
        self._left_at = 0
        self._passes_begun = 0
        self._position = (0, 0, 0)
        group.watch(lambda: _POSITION.pack(*self._position), self._positions_differ)

    def _positions_differ(self, marks: list[bytes], call: str) -> None:
        others = [rank for rank, mark in enumerate(marks) if mark != marks[0]]
        raise RanksDiffer(
            f"rank 0 came to {call} ({users_line()}) at {_in_words(marks[0])} of its training and "
            f"{name_ranks(others)} at {_in_words(marks[others[0]])}; every rank has to take the same steps: does a "
            "loop end early on one of them?",
            ranks=others,
            call=call,
        )

    def subscribe(self, subscriber: Subscriber) -> None:
        """Tell the subscriber of all later events; a second call changes nothing."""
        if subscriber in self._subscribers:
            return
        self._subscribers.append(subscriber)
        if type(subscriber).phase_begins is not Subscriber.phase_begins:
            self.group.hear_phases(subscriber.phase_begins)

    def tell(self, event: Callable[[Subscriber, Any], None], about: Any) -> None:
        """Tell all subscribers of an event, one of Subscriber's methods."""
        for subscriber in self._subscribers:
            getattr(subscriber, event.__name__)(about)

    def is_training(self, shuffled: bool) -> bool:
        """Whether a pass that begins now trains, as far as autograd and the models can tell."""
        if not torch.is_grad_enabled() or self.group.world.size == 1:
            return torch.is_grad_enabled()
        return self.models.trains(shuffled)

    def begin_pass(self, begun: Pass) -> None:
        """A loader is iterated again; its last pass ends, which a `break` had left unfinished."""
        others = [old for old in self._passes if old.of is not None and old.of is not begun.of]
        self._passes = [*others[1 - _MOST_PASSES :], begun]
        if begun.training:
            self._passes_begun += 1
            self._position = (self._passes_begun & 0xFFFF, begun.epoch & 0xFFFF, 0)
        self.tell(Subscriber.pass_begins, begun)

    def hand_out(self, share: Share, batch: Any, ragged: dict[str, Ragged] | None = None) -> None:
        """The script gets this batch or microbatch next."""
        this = share.of
        if not self._passes or self._passes[-1] is not this:
            self._passes = [*(old for old in self._passes if old is not this), this]
        self.group.enter("user" if this.training else "evaluation")
        this.latest, this.ragged = share, ragged or {}
        this.counted += share.mine
        if this.training:
            self.batches += 1
            self._position = (*self._position[:1], this.epoch & 0xFFFF, share.batch_start + share.all)
        if self.group.world.size > 1:
            tensors = list(named_tensors(batch))
            this.batch = {name: weakref.ref(tensor) for name, tensor in tensors}
            for _, tensor in tensors if share.microbatch is None else ():
                key = id(tensor)
                reference = weakref.ref(tensor, lambda _, key=key: self._shares.pop(key, None))  # type: ignore[misc]
                self._shares[key] = reference, share

    def leave_microbatches(self, share: Share) -> None:
        """All microbatches of this rank are done; `share` is its part of the step."""
        share.of.latest = share

    def begin_step(self, share: Share) -> None:
        self.tell(Subscriber.step_begins, share)
        if share.of.training:
            self.steps += 1

    def end_pass(self, ended: Pass) -> None:
        self.group.enter("user")
        self._passes = [old for old in self._passes if old is not ended]
        self.tell(Subscriber.pass_ends, ended)

    def leave_pass(self, left: Pass) -> None:
        """The pass is finished, or its iterator was collected; gradients do not depend on when that happens."""
        left.is_left = True
        self._left, self._left_at = left, self.batches
        self.call_weights.clear()
        for subscriber in self._subscribers:  # a generator may come here when Python has taken modules apart
            subscriber.pass_left(left)

    @property
    def at_hand(self) -> Share | None:
        """The latest batch or microbatch of the passes that are still iterated; `samestep.sum` counts its samples."""
        return next(iter(self.open_shares), None)

    @property
    def open_shares(self) -> list[Share]:
        """The share that a model is called with, then the latest of each pass that is still iterated, newest first."""
        shares = [this.latest for this in reversed(self._passes) if this.latest and not this.is_left]
        return shares if self._worked_on is None else [self._worked_on, *shares]

    @contextmanager
    def working_on(self, share: Share | None) -> Iterator[None]:
        """Context manager: a model is called with this share."""
        before, self._worked_on = self._worked_on, share
        try:
            yield
        finally:
            self._worked_on = before

    @property
    def trained(self) -> Share | None:
        """The share that weighs gradients: the latest of a training pass that is still iterated, else `at_hand`."""
        if self._worked_on is not None:
            return self._worked_on
        return next((share for share in self.open_shares if share.of.training), self.at_hand)

    def share_of(self, args: Any, kwargs: Mapping[str, Any]) -> Share | None:
        """The share of the batch that a model's input belongs to.

        An input that was computed belongs to the batch that is trained on. Where no pass is iterated, it belongs to the
        latest batch with as many rows.
        """
        if (share := self.batch_of(args, kwargs)) is not None:
            return share
        if not self._passes or (len(self._passes) == 1 and not self._passes[0].is_left):
            return self.trained
        if (share := self.trained) is not None:
            self._remark_unlike_shares()
            return share
        tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
        rows = {tensor.shape[0] for tensor in tensors if tensor.dim()}
        shares = (this.latest for this in reversed(self._passes) if this.latest is not None)
        return next((share for share in shares if share.mine in rows), None)

    def batch_of(self, args: Any, kwargs: Mapping[str, Any]) -> Share | None:
        """The share of the batch that a tensor in a model's input is from, None where all tensors were computed."""
        for value in (*args, *kwargs.values()):
            reference, share = self._shares.get(id(value), (None, None))
            if reference is not None and reference() is value and share is not None:
                self._take_again(share)
                return share
        return None

    def handed_out(self) -> Iterator[torch.Tensor]:
        return (tensor for reference, _ in list(self._shares.values()) if (tensor := reference()) is not None)

    def note_joined(self, tensor: torch.Tensor) -> None:
        self._joined[memory_of(tensor)] = tensor

    def is_joined(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor, or the tensor that it is a view of, has the rows of all ranks."""
        return memory_of(tensor) in self._joined

    def _take_again(self, share: Share) -> None:
        """Treat a batch of a finished pass as the latest of that pass: the script iterates a list of batches."""
        this = share.of
        if this.latest is not share and (this.is_left or this.is_again):
            this.latest, this.is_left, this.is_again = share, False, True
            self._passes = [*(old for old in self._passes if old is not this), this]

    def _remark_unlike_shares(self) -> None:
        """Print once that unfinished training passes give this rank different parts of their batches."""
        shares = [this.latest for this in self._passes if this.training and not this.is_left]
        parts = {share.mine / share.all for share in shares if share is not None and share.all}
        if len(parts) > 1 and torch.is_grad_enabled():
            self.group.say(
                "two loaders are iterated together and split their batches differently; the model's input is computed "
                "from a batch, so its gradients use the share of the latest training batch: let one dataset return both"
            )

    @property
    def is_lent(self) -> bool:
        """Whether this rank's count is of lent samples, which count on another rank.

        After an evaluation inside of a training step, a count is taken for the evaluation's.
        """
        if (share := self.at_hand) is None or not share.lent:
            return False
        has_evaluated = self.evaluated is not None and not self.evaluated.training
        return not (share.of.training and has_evaluated)

    @property
    def counted(self) -> int | None:
        """This rank's number of samples: of the batch at hand, or after a loop of the pass that was left last."""
        if (share := self.at_hand) is not None:
            return share.mine
        return self._left.counted if self._left is not None else None

    @property
    def evaluated(self) -> Pass | None:
        """The pass that a collected value may be from: the pass left last, if that was after the batch at hand came."""
        is_since = self.at_hand is None or self._left_at == self.batches
        return self._left if is_since else None

    @property
    def is_ambiguous(self) -> bool:
        """Whether this rank's part of the pass that was left since differs from its part of the batch at hand."""
        share, other = self.at_hand, self.evaluated
        if share is None or other is None or other.latest is None:
            return False
        return other.counted * share.all != share.mine * (other.latest.batch_start + other.latest.all)

    def weight_of_loss(self) -> float:
        """The factor of a loss where backward begins; 1.0 where the replicas' calls have different weights."""
        is_clear = self.models.weighs_losses and len(self.call_weights) == 1
        return next(iter(self.call_weights)) if is_clear else 1.0

    def weight_here(self) -> float:
        """The weight of this rank's mean over the batch at hand in an average over ranks."""
        if (share := self.trained) is None or self.models.adds():
            return float(share is None or not share.lent)
        return share.weight(self.group.world.size)

    def missing_factor(self, weight: float) -> float:
        """The factor that takes a gradient of the running backward from the loss's weight to `weight`."""
        return weight / self.loss_weight if weight and weight != self.loss_weight else float(bool(weight))


def _in_words(mark: bytes) -> str:
    _, epoch, samples = _POSITION.unpack(mark)
    return f"epoch {epoch + 1}, sample {samples}"


def spine() -> Spine:
    return joined().the(Spine)
