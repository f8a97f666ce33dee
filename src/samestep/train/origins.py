"""Which batch of the script a tensor, a model's input or a collected number is from.

Example: a script iterates `train`, and evaluates inside of the loop over `test`. A model that is called with a tensor
of a test batch works on the test batch's share; a number that is collected after the inner loop is of the test pass.
"""

import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from samestep.train.group.group import Group
from samestep.train.nested import memory_of, named_tensors
from samestep.train.passes import Pass, Share

_MOST_PASSES = _MOST_LOSSES = 8


class Origins:
    """The unfinished passes of this process, and the tensors of the batches that they have handed out."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._passes: list[Pass] = []
        # by id: the tensors of batches that are still in memory, with the batch's share
        self._shares: dict[int, tuple[weakref.ref[torch.Tensor], Share]] = {}
        self._joined = weakref.WeakValueDictionary[int, torch.Tensor]()
        self._worked_on: Share | None = None
        self._left: Pass | None = None
        self._takes_since = False  # whether a batch was handed out since a pass was left
        self.losses = deque[torch.Tensor](maxlen=_MOST_LOSSES)  # the latest losses that were trained

    def begin(self, begun: Pass) -> None:
        """A pass begins; the last pass of its loader ends, which a `break` had left unfinished."""
        others = [old for old in self._passes if old.of is not None and old.of is not begun.of]
        self._passes = [*others[1 - _MOST_PASSES :], begun]

    def take(self, share: Share, batch: Any) -> None:
        """The script gets this batch or microbatch next."""
        this = share.of
        self._put_last(this)
        self._takes_since = True
        if self._group.world.size == 1:
            return
        tensors = list(named_tensors(batch))
        this.batch = {name: weakref.ref(tensor) for name, tensor in tensors}
        for _, tensor in tensors if share.microbatch is None else ():
            key = id(tensor)
            reference = weakref.ref(tensor, lambda _, key=key: self._shares.pop(key, None))  # type: ignore[misc]
            self._shares[key] = reference, share

    def end(self, ended: Pass) -> None:
        self._passes = [old for old in self._passes if old is not ended]

    def leave(self, left: Pass) -> None:
        self._left, self._takes_since = left, False

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
        """The share of the batch that a model's input belongs to."""
        # An input that was computed belongs to the batch that is trained on. Where no pass is iterated, it belongs to
        # the latest batch with as many rows.
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
            if isinstance(value, torch.Tensor) and value._is_view() and id(value) not in self._shares:
                base = value._base  # of x.view(-1, 784)
                value = base if base is not None and base.shape[:1] == value.shape[:1] else value
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

    @property
    def is_lent(self) -> bool:
        """Whether this rank's count is of lent samples, which count on another rank."""
        # After an evaluation inside of a training step, a count is taken for the evaluation's.
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
        return None if self._takes_since and self.at_hand is not None else self._left

    def is_ambiguous(self, value: Any) -> bool:
        """Whether a value may be of the pass that was left since, of which this rank had another part."""
        share, other = self.at_hand, self.evaluated
        if share is None or other is None or other.latest is None or getattr(value, "requires_grad", False):
            return False
        if other.counted * share.all == share.mine * (other.latest.batch_start + other.latest.all):
            return False
        is_number = isinstance(value, float | torch.Tensor)
        return not is_number or not any(
            torch.equal(torch.as_tensor(value).to(loss), loss) for loss in self.losses
        )

    def _put_last(self, this: Pass) -> None:
        if not self._passes or self._passes[-1] is not this:
            self._passes = [*(old for old in self._passes if old is not this), this]

    def _take_again(self, share: Share) -> None:
        """Treat a batch of a finished pass as the latest of that pass: the script iterates a list of batches."""
        this = share.of
        if this.latest is not share and (this.is_left or this.is_again):
            this.latest, this.is_left, this.is_again = share, False, True
            self._put_last(this)

    def _remark_unlike_shares(self) -> None:
        """Print once that unfinished training passes give this rank different parts of their batches."""
        shares = [this.latest for this in self._passes if this.training and not this.is_left]
        parts = {share.mine / share.all for share in shares if share is not None and share.all}
        if len(parts) > 1 and torch.is_grad_enabled():
            self._group.say(
                "two loaders are iterated together and split their batches differently; the model's input is computed "
                "from a batch, so its gradients use the share of the latest training batch: let one dataset return both"
            )
