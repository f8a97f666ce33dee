"""When it is watched where the batch is: in the first batch of each kind, and in each kind of call of a model.

Of the loop's first batch all is watched until backward() begins, so that it is known of what a model is called with:
two views end to end have the batch twice, and noise for some pictures to show has none of it.
"""

import gc
import itertools
import os
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from samestep.train.backward import is_functional
from samestep.train.batch_places import BatchPlaces
from samestep.train.batch_sizes import Place
from samestep.train.draw_lines import line_of_draw
from samestep.train.draw_parts import part_at
from samestep.train.nested import memory_of, named_tensors
from samestep.train.step import Pass, Share, Spine
from samestep.train.subscriber import Subscriber

_MOST_TIMES_AGAIN = 3
_MOST_LOSSES = 5
_MOST_TIMES_WATCHED = 32
_OPERATIONS: Any = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]
_IN_BACKWARD = ("backward", "exchange")


class Again:
    """Whether a batch is watched again: where a loss came with a number of operations that no watched batch had.

    So a term that a loss has only after a warm-up, or in every 16th step, is seen; that costs less than a look at the
    loss. Where every batch has another number, ever fewer are watched.
    """

    def __init__(self) -> None:
        self._made = self._until = self._not_before = 0
        self._known: set[int] = set()
        self._is_watched = False

    def is_due(self, batches: int) -> bool:
        """Whether the batch that begins now is to be watched again."""
        return batches < self._until

    def batch_begins(self, *, is_watched: bool) -> None:
        self._made, self._is_watched = _OPERATIONS(), is_watched

    def loss_made(self, batches: int) -> None:
        """Backward begins in this batch."""
        before, self._made = self._made, _OPERATIONS()
        if (made := self._made - before) in self._known:
            return
        if self._is_watched:
            self._known.add(made)
            self._until = 0
        elif self._until <= batches >= self._not_before:
            self._until, self._not_before = batches + _MOST_TIMES_WATCHED, 2 * batches


class Watching(Subscriber):
    """What is watched now (`places`), and in which kind of a model's call with the batch this process is."""

    def __init__(self, spine: Spine) -> None:
        self.places: BatchPlaces | None = None
        self.in_model: Any = None
        self.is_in_call = False
        self.is_compiled = self.finds_draws = False
        self._spine, self._pid = spine, os.getpid()
        self._loop: BatchPlaces | None = None
        self._losses_to_watch = 0
        self._seen: set[Any] = set()
        self._again = Again()
        self._kind_of_loop: Any = None
        self._times_again = Counter[Any]()
        # of each call, where the batch is in what the model is given
        self._given: dict[Any, list[list[Place | None]]] = {}
        # by their memory, the tensors that were there before the first batch
        self._older: dict[int, weakref.ref[torch.Tensor]] = {}

    def watch_again(self) -> None:
        """The next call of this kind is watched: it draws where no call has drawn."""
        self._seen.discard(self.in_model)

    @contextmanager
    def model_called(self, model: torch.nn.Module, args: Any, kwargs: Any) -> Iterator[None]:
        """Local. While a model is called."""
        share = self._spine.at_hand
        # what torch.func maps and derives has no memory of its own
        if share is None or is_functional():
            yield
            return
        given = [tensor for _, tensor in named_tensors((args, kwargs))]
        at = model.training, torch.is_grad_enabled(), line_of_draw()
        call = weakref.ref(model), *at, tuple(one.dim() for one in given)
        found = self._places_in(call, given, share)
        mine = share.mine
        has_share = any(
            mine in one.shape[:2] if place is None else place.dim is not None
            for one, place in zip(given, found, strict=True)
        )
        kind = *call, *(_times(one, place, mine) for one, place in zip(given, found, strict=True))
        if self.places and self.places is self._loop:
            self._seen.add(kind)
        before, self.in_model = (self.in_model, self.is_in_call), has_share and kind
        self.is_in_call = bool(given)
        try:
            if kind in self._seen or not 0 < mine < share.all or self.places:
                yield
                return
            self._seen.add(kind)
            constant = itertools.chain(model.parameters(), model.buffers())
            self.places = BatchPlaces(share, zip(given, found, strict=True), constant)
            try:
                with self.places:
                    yield
            finally:
                self.places = None
        finally:
            self.in_model, self.is_in_call = before

    def _places_in(self, call: Any, given: Sequence[torch.Tensor], share: Share) -> list[Place | None]:
        """Where the batch is in what a model is called with, as it is seen now or was in such a call."""
        known = self._given.setdefault(call, [])
        if self.places and self.places is self._loop:
            found = [self.places.place(one) for one in given]
            if found not in known:
                known.append(found)
            return found
        older = [Place(None) if self.is_older(one, share) else None for one in given]
        if not share.mine:
            return older
        for found in known:
            pairs = zip(found, given, strict=True)
            if all(place is None or part_at(place, one.shape, share) for place, one in pairs):
                return found
        if any(_times(one, place, share.mine) > 1 for one, place in zip(given, older, strict=True)):
            # some are called where nothing is watched, after backward()
            self._times_again[self._kind_of_loop] += 1
            if self._times_again[self._kind_of_loop] <= _MOST_TIMES_AGAIN:
                self._seen.discard(self._kind_of_loop)
        return older

    def is_older(self, tensor: torch.Tensor, share: Share | None) -> bool:
        """Whether it was there before the first batch, as noise that is fixed for pictures to show."""
        held = self._older.get(memory_of(tensor), lambda: None)()
        batch = share.of.tensors() if share is not None else ()
        return held is not None and all(memory_of(tensor) != memory_of(one) for _, one in batch)

    def step_begins(self, share: Share) -> None:
        self._leave_loop()
        self._begin_to_watch(share)
        self._again.batch_begins(is_watched=self._loop is not None)

    def _begin_to_watch(self, share: Share) -> None:
        """Watch this batch, where it is the first of its kind or one to be watched again."""
        shares, group = self._spine.open_shares, self._spine.group
        tensors = [(one, *named) for one in shares for named in one.of.tensors()]
        dims = (tensor.dim() for *_, tensor in tensors)
        self._kind_of_loop = kind = (share.of.training, torch.is_grad_enabled(), line_of_draw(), *dims)
        is_alike = all(one.rows == share.rows and (one is share or not one.of.ragged) for one in shares)
        # a microbatch is whole on one rank
        can_be = 0 < share.mine < share.all and share.microbatches == 1 and not self.is_compiled
        # what mixes samples is said by rank 0, and was said before a restart
        is_of_use = share.of.training and group.world.rank == 0 and not group.restarts
        if is_of_use and self._again.is_due(self._spine.batches):
            self._seen.discard(kind)
        if kind in self._seen or not (is_alike and can_be):
            return
        self._seen.add(kind)
        if not (self.finds_draws or is_of_use):
            return
        if self.finds_draws and not self._older:
            objects = (one for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter))
            of_batches = set(map(memory_of, self._spine.handed_out()))
            self._older = {
                memory_of(one): weakref.ref(one) for one in objects if memory_of(one) not in of_batches
            }
        given = [(tensor, None if one is share else Place(one.dim_in(name))) for one, name, tensor in tensors]

        def is_paused() -> bool:
            is_over = self._loop is not watched or os.getpid() != self._pid
            return is_over or self._spine.is_reading or self._spine.group.phase[0] in _IN_BACKWARD

        def is_new(tensor: torch.Tensor) -> bool:
            return self.finds_draws and not self.is_older(tensor, share)

        parameters = self._spine.models.parameters()
        watched = BatchPlaces(share, given, parameters, is_paused, is_new, self._spine.is_joined)
        self._loop = self.places = watched
        self._losses_to_watch = _MOST_LOSSES
        watched.__enter__()  # type: ignore[no-untyped-call]

    def _leave_loop(self) -> None:
        watched, self._loop = self._loop, None
        if watched is not None:
            self.places = None
            modes = _get_current_dispatch_mode_stack()
            if modes and modes[-1] is watched:  # else it lets all pass
                watched.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def backward_begins(self, loss: torch.Tensor) -> None:
        spine, watched = self._spine, self._loop
        spine.loss = watched.averaged(loss) if watched is not None else None
        spine.weighed_by = spine.weighed_by or (watched.weighed_by if watched is not None else "")
        if spine.loss is not None and spine.loss.does:
            how = "add that up with samestep.sum" if spine.loss.sums else "average over it with samestep.mean"
            spine.group.say(
                f"what {spine.loss.does} has only this rank's samples, so the loss is not the serial script's: first "
                f"join the batch with samestep.gather(...), or {how}(...)",
                what="mixed samples",
            )
        # a later loss of this batch may mix samples too, as of a GAN's generator
        self.places, self._losses_to_watch = None, self._losses_to_watch - 1
        if self._losses_to_watch <= 0:
            self._leave_loop()
        self._again.loss_made(spine.batches)

    def slopes_given(self, given: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor | None], bool]) -> None:
        if self._loop is not None:
            self._loop.mark_slopes(*given)

    def pass_left(self, left: Pass) -> None:
        self._leave_loop()


def _times(tensor: torch.Tensor, place: Place | None, mine: int) -> int:
    """How often it has the batch, one behind the other; 0 where it has none of it."""
    if place is not None:
        return 0 if place.dim is None else place.before * place.after
    is_several = mine and tensor.dim() and mine not in tensor.shape[:2] and not tensor.shape[0] % mine
    return tensor.shape[0] // mine if is_several else 1
