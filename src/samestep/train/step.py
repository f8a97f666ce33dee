"""The spine: where a pass, a step and a microbatch begin and end, and which samples of them this rank has.

`loader` and `steps` publish here. Replicas, their comparison, the pulse and the random streams of exact runs
subscribe. Data does not know of models, and models do not know of data.
"""

import struct
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from samestep.errors import RanksDiffer
from samestep.text import name_ranks
from samestep.train.group.control import users_line
from samestep.train.group.group import Group, Member
from samestep.train.group.world import joined
from samestep.train.loss import Averaged
from samestep.train.nested import memory_of, named_tensors
from samestep.train.subscriber import Models, Subscriber

_MOST_PASSES = 8
_POSITION = struct.Struct("<HHI")


def cut(count: int, size: int, rank: int) -> tuple[int, int]:
    """Where rank's part of count things begins and ends; parts differ by at most one, larger ones first."""
    small, larger = divmod(count, size)
    start = rank * small + min(rank, larger)
    return start, start + small + (rank < larger)


class Pass:
    """One way through a loader; a pass that the script has left keeps neither loader nor order alive."""

    def __init__(self, of: object, epoch: int, *, training: bool, microbatches: Collection[int] = ()) -> None:
        """`microbatches` are the numbers of microbatches that its steps have, where they are made of such."""
        self.epoch, self.training, self.microbatches = epoch, training, microbatches
        self.seed = 0
        self.batches = 0
        self.counted = 0
        # the samples of its batches so far, on all ranks, and how many batches of so many followed each other
        self.sizes: list[list[int]] = []
        self.is_left = self.is_again = False
        self.latest: Share | None = None
        # the batch's tensors by their place in it, which is also the place of what is ragged
        self.batch: dict[str, weakref.ref[torch.Tensor]] = {}
        self.ragged: dict[str, Ragged] = {}
        self._of = weakref.ref(of)
        self._order: Callable[[], Any] = lambda: None

    def take_order(self, order: Any, seed: int) -> None:
        """The order of the samples, and the seed that belongs to it."""
        self._order, self.seed = weakref.ref(order), seed

    def note(self, samples: int) -> None:
        """A batch of so many samples on all ranks comes next."""
        if not self.sizes or self.sizes[-1][0] != samples:
            self.sizes.append([samples, 0])
        self.sizes[-1][1] += 1

    def places(self, size: int) -> list[list[range]]:
        """For each rank, where its samples of each batch so far are among those of all."""
        found: list[list[range]] = [[] for _ in range(size)]
        start = 0
        for samples, batches in self.sizes:
            parts = [range(*cut(samples, size, rank)) for rank in range(size)]
            for first in range(start, start + samples * batches, samples):
                for places, part in zip(found, parts, strict=True):
                    places.append(range(first + part.start, first + part.stop))
            start += samples * batches
        return found

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of the batch that are still there, with their places in it."""
        found = ((name, held()) for name, held in self.batch.items())
        return ((name, tensor) for name, tensor in found if tensor is not None)

    @property
    def of(self) -> Any:
        return self._of()

    @property
    def order(self) -> Any:
        return self._order()


class Rows(NamedTuple):
    """Of what lies along a dimension, samples say: this rank's, which are those from `start` of `all`."""

    mine: int
    start: int
    all: int


class Ragged(NamedTuple):
    """Where a tensor of the batch has not one row for each sample: nodes of graphs, words laid end to end, or where
    another dimension than the first is that of the samples.
    """

    dim: int
    rows: Rows


@dataclass(frozen=True, eq=False, slots=True)
class Share:
    """This rank's samples of a batch, or of one microbatch of it, as positions in the order of the epoch."""

    of: Pass
    batch_start: int
    start: int
    mine: int
    all: int
    lent: bool = False
    microbatch: int | None = None
    microbatches: int = 1
    first: bool = True
    last: bool = True
    step: int = -1

    @property
    def samples(self) -> torch.Tensor:
        """The indices of this rank's samples, while the pass goes on."""
        order = self.of.order
        return (
            torch.empty(0, dtype=torch.int64, device="cpu")
            if order is None
            else order[self.start : self.start + self.mine]
        )

    @property
    def rows(self) -> Rows:
        """Its part of the samples of the batch."""
        return Rows(self.mine, self.start - self.batch_start, self.all)

    def dim_in(self, name: str) -> int:
        """The dimension of the samples in this tensor of the batch."""
        ragged = self.of.ragged.get(name)
        return ragged.dim if ragged is not None and ragged.rows == self.rows else 0

    def weight(self, size: int) -> float:
        """What this rank's mean loss counts for in a plain average over ranks: 1.0 where shares are equal."""
        return self.mine * size / self.all if self.all else 1.0


class Spine(Member):
    """Knows the passes of this process that are not finished, and the batch that was handed out last."""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self.steps = self.batches = self.inside_model = 0
        self.models = Models()
        self.is_reading = False
        # what the loss is multiplied by in the backward that goes on, and what of it is left in gradients of leaves
        self.root = self.leaves = 1.0
        self.asks_for_leaves = False
        # what the calls of models count for that no backward has followed yet
        self.called: set[float] = set()
        # how the loss is made that backward begins with, where that was followed, and where a number was read that
        # weighs such a loss
        self.loss: Averaged | None = None
        self.weighed_by = ""
        self._subscribers: list[Subscriber] = []
        self._passes: list[Pass] = []
        # of which batch each tensor is that was handed out and is still there, by its id
        self._shares: dict[int, tuple[weakref.ref[torch.Tensor], Share]] = {}
        self._joined = weakref.WeakValueDictionary[int, torch.Tensor]()
        self._worked_on: Share | None = None
        self._left: Pass | None = None
        self._left_at = 0
        self._passes_begun = 0
        self._position = (0, 0, 0)
        group.watch(lambda: _POSITION.pack(*self._position), self._at_different_positions)

    def _at_different_positions(self, marks: list[bytes], call: str) -> None:
        others = [rank for rank, mark in enumerate(marks) if mark != marks[0]]
        raise RanksDiffer(
            f"rank 0 came to {call} ({users_line()}) at {_in_words(marks[0])} of its training and "
            f"{name_ranks(others)} at {_in_words(marks[others[0]])}; every rank has to take the same steps: does a "
            "loop end early on one of them?",
            ranks=others,
            call=call,
        )

    def subscribe(self, subscriber: Subscriber) -> None:
        """Tell it of all that comes; once is enough."""
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
        """Whether a pass that begins now is one of training, as far as autograd and the subscribers can tell."""
        if not torch.is_grad_enabled() or self.group.world.size == 1:
            return torch.is_grad_enabled()
        return self.models.trains(shuffled)

    def begin_pass(self, begun: Pass) -> None:
        """A loader is iterated anew; what was left of its last pass is given up."""
        # A pass that the script has left by `break` stays here until its loader is iterated again.
        held = [old for old in self._passes if old.of is not None and old.of is not begun.of]
        self._passes = [*held[1 - _MOST_PASSES :], begun]
        if begun.training:
            self._passes_begun += 1
            self._position = (self._passes_begun & 0xFFFF, begun.epoch & 0xFFFF, 0)
        self.tell(Subscriber.pass_begins, begun)

    def hand_out(self, share: Share, batch: Any, ragged: dict[str, Ragged] | None = None) -> None:
        """This batch or microbatch is what the script works on from here."""
        held = share.of
        if not self._passes or self._passes[-1] is not held:
            self._passes = [*(old for old in self._passes if old is not held), held]
        self.group.enter("user" if held.training else "evaluation")
        held.latest, held.ragged = share, ragged or {}
        held.counted += share.mine
        if held.training:
            self.batches += 1
            self._position = (*self._position[:1], held.epoch & 0xFFFF, share.batch_start + share.all)
        if self.group.world.size > 1:
            found = list(named_tensors(batch))
            held.batch = {name: weakref.ref(tensor) for name, tensor in found}
            for _, tensor in found if share.microbatch is None else ():
                key = id(tensor)
                gone = weakref.ref(tensor, lambda _, key=key: self._shares.pop(key, None))  # type: ignore[misc]
                self._shares[key] = gone, share

    def leave_microbatches(self, share: Share) -> None:
        """All microbatches of this rank are done; `share` is its part of the step."""
        share.of.latest = share

    def begin_step(self, share: Share) -> None:
        self.tell(Subscriber.step_begins, share)
        if share.of.training:
            self.steps += 1

    def end_pass(self, ended: Pass) -> None:
        """The loader has no more batches in this pass."""
        self.group.enter("user")
        self._passes = [old for old in self._passes if old is not ended]
        self.tell(Subscriber.pass_ends, ended)

    def leave_pass(self, left: Pass) -> None:
        """The pass is finished, or its iterator is gone; gradients do not depend on when that is."""
        left.is_left = True
        self._left, self._left_at = left, self.batches
        self.called.clear()
        self.tell(Subscriber.pass_left, left)

    @property
    def at_hand(self) -> Share | None:
        """What totals count: the batch or microbatch handed out last by a pass that is still iterated."""
        return next(iter(self.open_shares), None)

    @property
    def open_shares(self) -> list[Share]:
        """The batch that a model is called with, and those that passes still iterated have handed out, latest first."""
        shares = [held.latest for held in reversed(self._passes) if held.latest and not held.is_left]
        return shares if self._worked_on is None else [self._worked_on, *shares]

    @contextmanager
    def working_on(self, share: Share | None) -> Iterator[None]:
        """Meanwhile a model is called with this share."""
        before, self._worked_on = self._worked_on, share
        try:
            yield
        finally:
            self._worked_on = before

    @property
    def trained(self) -> Share | None:
        """What gradients count for: the latest batch of a training pass that is iterated, else of any pass."""
        if self._worked_on is not None:
            return self._worked_on
        for held in reversed(self._passes):
            if held.training and held.latest is not None and not held.is_left:
                return held.latest
        return self.at_hand

    def share_of(self, args: Any, kwargs: Mapping[str, Any]) -> Share | None:
        """The share that a model's input is from: that of the batch of which a tensor is in the input.

        What was computed from a batch counts as from the batch trained on, or where all iterators are gone, as from
        the latest batch with as many rows.
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
        shares = (held.latest for held in reversed(self._passes) if held.latest is not None)
        return next((share for share in shares if share.mine in rows), None)

    def batch_of(self, args: Any, kwargs: Mapping[str, Any]) -> Share | None:
        """The share of the batch of which a tensor is in a model's input, None where all of it was computed."""
        for value in (*args, *kwargs.values()):
            found, share = self._shares.get(id(value), (None, None))
            if found is not None and found() is value and share is not None:
                self._take_again(share)
                return share
        return None

    def handed_out(self) -> Iterator[torch.Tensor]:
        """The tensors of all batches that are still there."""
        return (one for held, _ in list(self._shares.values()) if (one := held()) is not None)

    def note_joined(self, tensor: torch.Tensor) -> None:
        """It has the rows of all ranks."""
        self._joined[memory_of(tensor)] = tensor

    def is_joined(self, tensor: torch.Tensor) -> bool:
        """Whether it is, or is a view of, what has the rows of all ranks."""
        return memory_of(tensor) in self._joined

    def _take_again(self, share: Share) -> None:
        """Batches that were collected in a list are gone through again, which is a pass too."""
        held = share.of
        if held.latest is not share and (held.is_left or held.is_again):
            held.latest, held.is_left, held.is_again = share, False, True
            self._passes = [*(old for old in self._passes if old is not held), held]

    def _remark_unlike_shares(self) -> None:
        """Say once that unfinished training passes give this rank unlike parts of their batches."""
        shares = [held.latest for held in self._passes if held.training and not held.is_left]
        parts = {share.mine / share.all for share in shares if share is not None and share.all}
        if len(parts) > 1 and torch.is_grad_enabled():
            self.group.say(
                "two loaders are iterated together and split their batches differently; the model's input is computed "
                "from a batch, so its gradients use the share of the latest training batch: let one dataset return both"
            )

    @property
    def is_lent(self) -> bool:
        """Whether what this rank counted is of another rank's batch, on which it only takes the step along.

        After an evaluation in the middle of a training step it is taken for what the evaluation counted.
        """
        if (share := self.at_hand) is None or not share.lent:
            return False
        has_evaluated = self.evaluated is not None and not self.evaluated.training
        return not (share.of.training and has_evaluated)

    @property
    def counted(self) -> int | None:
        """This rank's samples: of the batch at hand, or after a loop of the pass that was left last."""
        if (share := self.at_hand) is not None:
            return share.mine
        return self._left.counted if self._left is not None else None

    @property
    def evaluated(self) -> Pass | None:
        """The pass that a collected value may be of: the one left last, and after the batch at hand came."""
        is_since = self.at_hand is None or self._left_at == self.batches
        return self._left if is_since else None

    @property
    def is_ambiguous(self) -> bool:
        """Whether this rank had another part of a pass that was left since than of the batch at hand."""
        share, other = self.at_hand, self.evaluated
        if share is None or other is None or other.latest is None:
            return False
        return other.counted * share.all != share.mine * (other.latest.batch_start + other.latest.all)

    def weight_of_loss(self) -> float:
        """What a loss counts for where backward begins; 1.0 where it is made of calls that count for unlike parts."""
        is_clear = self.models.weigh_losses and len(self.called) == 1
        return next(iter(self.called)) if is_clear else 1.0

    def weight_here(self) -> float:
        """What this rank's mean over the batch at hand counts for in a plain average over ranks."""
        if (share := self.trained) is None or self.models.adds():
            return float(share is None or not share.lent)
        return share.weight(self.group.world.size)

    def lacks(self, weight: float) -> float:
        """The factor that a gradient in this backward lacks of a weight that it has to have."""
        return weight / self.root if weight and weight != self.root else float(bool(weight))


def _in_words(mark: bytes) -> str:
    _, epoch, samples = _POSITION.unpack(mark)
    return f"epoch {epoch + 1}, sample {samples}"


def spine() -> Spine:
    """The spine of the group of this process."""
    return joined().the(Spine)
