"""The spine: where a pass, a step and a microbatch begin and end, and which of their samples are this rank's.

`loader` and `steps` publish here. Replicas, their comparison, the meter and the random draws subscribe. Neither data/
nor model/ imports the other; both import this module.
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from samestep.errors import RanksDiffer
from samestep.text import name_ranks
from samestep.train.group.control import users_line
from samestep.train.group.group import Group, Member
from samestep.train.group.world import joined
from samestep.train.loss import Averaged
from samestep.train.origins import Origins
from samestep.train.passes import Pass, Ragged, Share
from samestep.train.script.loops import loop_of_next, steps_optimizer_of
from samestep.train.subscriber import Models, Subscriber
from samestep.train.weights import Weights


class Spine(Member):
    """Counts steps and tells subscribers of events."""

    # derives_twice: whether a backward has kept a graph of its own, as a gradient penalty asks. undone: by id, biases
    # that a BatchNorm takes away again. origins: which batch a tensor or a collected number is from. weights: the
    # factors of losses and gradients.

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self.steps = self.batches = self.backwards = self.inside_model = self.totals = 0
        self.epochs_begun = 0  # by loops over `epochs`, to whose beginning a resume leads
        self.models = Models()
        self.is_reading = self.derives_twice = False
        self.origins = Origins(group)
        self.undone: dict[int, weakref.ref[torch.Tensor]] = {}
        self.weights = Weights(self.origins, group.world.size)
        # how the latest loss depends on averages, if that was followed, and the line that reads a number that weighs it
        self.loss: Averaged | None = None
        self.weighed_by = ""
        self._subscribers: list[Subscriber] = []
        self._position = (0, 0, 0)  # passes begun, epoch, samples
        group.watch(lambda: self._position, self._positions_differ)

    def _positions_differ(self, marks: list[Any], call: str) -> None:
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
        for subscriber in self._subscribers:
            getattr(subscriber, event.__name__)(about)

    def is_undone(self, bias: torch.Tensor) -> bool:
        """Whether a BatchNorm takes this bias away again; another tensor may have the id of one that is gone."""
        reference = self.undone.get(id(bias))
        return reference is not None and reference() is bias

    def is_training(self, shuffled: bool) -> bool:
        """Whether a pass that begins now trains, as far as autograd and the models can tell."""
        if not torch.is_grad_enabled() or self.group.world.size == 1:
            return torch.is_grad_enabled()
        # a model in eval mode may train too, with its BatchNorm and dropout frozen
        return self.models.trains(shuffled) or steps_optimizer_of({*map(id, self.models.parameters())})

    def begin_pass(self, begun: Pass) -> None:
        """A loader is iterated again; its last pass ends, which a `break` had left unfinished."""
        self.origins.begin(begun)
        if begun.training:
            self._position = (self._position[0] + 1, begun.epoch, 0)
        self.tell(Subscriber.pass_begins, begun)

    def hand_out(self, share: Share, batch: Any, ragged: dict[str, Ragged] | None = None) -> None:
        """The script gets this batch or microbatch next."""
        this = share.of
        self.origins.take(share, batch)
        self.group.enter("user" if this.training else "evaluation")
        this.latest, this.ragged = share, ragged or {}
        this.loop = loop_of_next() if share.all < self.group.world.size else None
        this.counted += share.mine
        self.group.share = (share.mine, share.all) if share.microbatch is None else (0, 0)
        if this.training:
            self.batches += 1
            self._position = (self._position[0], this.epoch, share.batch_start + share.all)

    def stepped(self, this: Pass, handed_out: Iterable[tuple[Any, Share]]) -> Iterator[Any]:
        """Yield the batches of a pass that has begun, each of them one step, and tell the subscribers."""
        try:
            for batch, share in handed_out:
                self.begin_step(share)
                yield batch
                self.tell(Subscriber.step_ends, share)
            self.end_pass(this)
        finally:
            self.leave_pass(this)

    def begin_step(self, share: Share) -> None:
        self.tell(Subscriber.step_begins, share)
        if share.of.training:
            self.steps += 1

    def end_pass(self, ended: Pass) -> None:
        self.group.enter("user")
        self.origins.end(ended)
        self.tell(Subscriber.pass_ends, ended)

    def leave_loop_of_next(self) -> None:
        """Leave a pass whose small last batch the script took by next(), where it has left the loop around that."""
        share = self.origins.at_hand
        if share is not None and share.of.loop is not None and share.of.loop.is_left:
            self.leave_pass(share.of)

    def leave_pass(self, left: Pass) -> None:
        """The pass is finished, or its iterator was collected; gradients do not depend on when that happens."""
        left.is_left = True
        self.origins.leave(left)
        self.weights.of_calls.clear()
        # a generator may come here when Python takes modules apart, whose names are then None
        if sys is not None and not sys.is_finalizing():
            self.tell(Subscriber.pass_left, left)


def _in_words(mark: Sequence[int]) -> str:
    _, epoch, samples = mark
    return f"epoch {epoch + 1}, sample {samples}"


def spine() -> Spine:
    return joined().the(Spine)
