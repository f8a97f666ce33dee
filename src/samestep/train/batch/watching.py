"""Decides when BatchPlaces runs: in the first batch of each kind, and in the first call of each kind of a model.

In a loop's first batch every operation is followed until backward() begins, which shows where the batch is in a model's
inputs. Two views of a batch that are concatenated have it twice; noise that is kept to show pictures does not have it.
Later batches of the same kind run without BatchPlaces, and use the places that were found.
"""

import importlib
import itertools
import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from samestep.train.backward import is_functional
from samestep.train.batch.beside import Beside
from samestep.train.batch.parts import part_at
from samestep.train.batch.places import BatchPlaces
from samestep.train.batch.sizes import Place, Traced
from samestep.train.batch.views import dim_in_view
from samestep.train.group.alive import alive
from samestep.train.group.control import users_line
from samestep.train.nested import memory_of, named_tensors
from samestep.train.passes import Pass, Share
from samestep.train.script.lines import line_of_draw
from samestep.train.step import Spine
from samestep.train.subscriber import Subscriber

_MOST_TIMES_AGAIN = 3
_MOST_LOSSES = 5
_MOST_TIMES_WATCHED = 32
_OPERATIONS: Any = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_IN_BACKWARD = ("backward", "exchange")


class Again:
    """Decides whether a batch is watched again: after a loss whose number of operations no watched batch had."""

    # That shows a term that the loss has only after a warm-up, or in every 16th step, and costs less than to walk the
    # graph. Where every batch has another number of operations, batches are watched less and less often. A batch that
    # is smaller than another may only have operations that weigh unlike shares: then the next of its size is watched.

    def __init__(self) -> None:
        self._operations = self._until = self._not_before = self._largest = self._samples = 0
        self._known: set[int] = set()
        self._smaller: dict[int, bool] = {}  # sizes, and whether the next batch of this size is to be watched
        self._is_watched = False

    def is_due(self, batches: int, samples: int) -> bool:
        return batches < self._until or self._smaller.get(samples, False)

    def batch_begins(self, samples: int, *, is_watched: bool) -> None:
        self._operations, self._is_watched = _OPERATIONS(), is_watched
        self._samples, self._largest = samples, max(self._largest, samples)
        if is_watched:
            self._smaller[samples] = False

    def loss_made(self, batches: int) -> None:
        """Backward begins in this batch."""
        before, self._operations = self._operations, _OPERATIONS()
        if (num_operations := self._operations - before) in self._known:
            return
        if self._is_watched:
            self._known.add(num_operations)
            self._until = 0
        elif self._samples < self._largest:
            self._smaller.setdefault(self._samples, True)
        elif self._until <= batches >= self._not_before:
            self._until, self._not_before = batches + _MOST_TIMES_WATCHED, 4 * batches


class Watching(Subscriber):
    """Holds the BatchPlaces that runs now (`places`) and the kind of the model's call that runs now (`in_model`)."""

    def __init__(self, spine: Spine, say_other: Callable[[str, str], str]) -> None:
        self.places: BatchPlaces | None = None
        self.in_model: Any = None
        self.is_in_call = False
        self.is_compiled = self.finds_draws = False
        self._spine, self._pid = spine, os.getpid()
        self._loop_places: BatchPlaces | None = None
        self._over: list[BatchPlaces] = []
        self._losses_to_watch = 0
        self._watched_kinds: set[Any] = set()
        self._again = Again()
        self._kind_of_loop: Any = None
        self._times_again = Counter[Any]()
        # for each kind of call, the places of the batch in a model's inputs, as they were found in watched batches
        self._known_places: dict[Any, list[list[Place | None]]] = {}
        # the tensors that are older than the first batch, by their memory
        self._before_loop: dict[int, weakref.ref[torch.Tensor]] = {}
        self._drawn_at = ""
        self._beside = Beside(spine.group, say_other)
        spine.group.watch(lambda: bool(self._drawn_at), self._remark_drawn)

    def watch_again(self) -> None:
        """Watch the next call of this kind: this call draws at a line where no watched call has drawn."""
        self._watched_kinds.discard(self.in_model)

    def _heed_compiled(self) -> None:
        """Follow no operations where the script compiles: torch skips for ever what it meets under a dispatch mode."""
        self.is_compiled = True
        # samestep's frames run as they are, and the model's forward is compiled in one piece
        with suppress(Exception):
            importlib.import_module("torch._dynamo.trace_rules").add("samestep")
        inductor = sys.modules.get("torch._inductor.config")
        if self.finds_draws and not getattr(inductor, "fallback_random", False):
            self._spine.group.say(
                "a compiled model may draw by itself and then does not draw the serial script's numbers under "
                "same=True; compile without fusing random operations (torch._inductor.config.fallback_random = True)"
            )

    @contextmanager
    def model_called(self, model: torch.nn.Module, args: Any, kwargs: Any) -> Iterator[None]:
        """Local. Note the call of a model, and watch it where it is the first of its kind."""
        share = self._spine.origins.at_hand
        # tensors under torch.func have no memory of their own
        if share is None or is_functional():
            yield
            return
        tensors = [tensor for _, tensor in named_tensors((args, kwargs))]
        at = model.training, torch.is_grad_enabled(), line_of_draw()
        call = weakref.ref(model), *at, tuple(tensor.dim() for tensor in tensors)
        places = self._places_in(call, tensors, share)
        mine = share.mine
        pairs = list(zip(tensors, places, strict=True))
        has_share = any(
            mine in tensor.shape[:2] if place is None else place.dim is not None for tensor, place in pairs
        )
        kind = *call, *(_times(tensor, place, mine) for tensor, place in pairs)
        if self.places and self.places is self._loop_places:
            self._watched_kinds.add(kind)
        outer, self.in_model = (self.in_model, self.is_in_call), has_share and kind
        self.is_in_call = bool(tensors)
        try:
            if kind in self._watched_kinds or not 0 < mine < share.all or self.places or self.is_compiled:
                yield
                return
            self._watched_kinds.add(kind)
            self.places = BatchPlaces(share, pairs, itertools.chain(model.parameters(), model.buffers()))
            try:
                with self.places:
                    yield
            finally:
                self.places = None
        finally:
            self.in_model, self.is_in_call = outer

    def _places_in(self, call: Any, tensors: Sequence[torch.Tensor], share: Share) -> list[Place | None]:
        """The place of the batch in each input of a model, found now or in an earlier call of this kind."""
        known = self._known_places.setdefault(call, [])
        if self.places and self.places is self._loop_places:
            places = [self.places.place(tensor) for tensor in tensors]
            if places not in known:
                known.append(places)
            return places
        older = [Place(None) if self.is_older(tensor, share) else None for tensor in tensors]
        if not share.mine:
            return older
        for places in known:
            pairs = zip(places, tensors, strict=True)
            if all(place is None or part_at(place, tensor.shape, share) for place, tensor in pairs):
                return places
        if any(_times(tensor, place, share.mine) > 1 for tensor, place in zip(tensors, older, strict=True)):
            # watch a batch again, but not forever: a call after backward() is never seen there
            self._times_again[self._kind_of_loop] += 1
            if self._times_again[self._kind_of_loop] <= _MOST_TIMES_AGAIN:
                self._watched_kinds.discard(self._kind_of_loop)
        return older

    def is_older(self, tensor: torch.Tensor, share: Share | None) -> bool:
        """Whether a tensor is older than the first batch, as noise that is kept to show pictures."""
        reference = self._before_loop.get(memory_of(tensor), lambda: None)()
        batch = share.of.tensors() if share is not None else ()
        return reference is not None and all(memory_of(tensor) != memory_of(given) for _, given in batch)

    def may_be_samples(self, rows: Any) -> bool:
        """Whether the rows of a tensor, or the items of a list, may be samples of the batch at hand, and not steps."""
        is_listed = not isinstance(rows, torch.Tensor)
        tensor, share = next(iter(rows)) if is_listed else rows, self._spine.origins.at_hand
        if share is None or not isinstance(tensor, torch.Tensor):
            return True
        for name, given in share.of.tensors():
            if memory_of(given) == memory_of(tensor):
                return is_listed or not dim_in_view(tensor, given, share.dim_in(name), share.mine)
        place = self.places.place(tensor) if self.places is not None else None
        return place is None or place.dim == (None if is_listed else 0)

    def step_begins(self, share: Share) -> None:
        self._leave_loop()
        if not self.is_compiled and _has_compiled():
            self._heed_compiled()
        self._begin_to_watch(share)
        self._again.batch_begins(share.all, is_watched=self._loop_places is not None)

    def _begin_to_watch(self, share: Share) -> None:
        """Watch this batch, if it is the first of its kind or is to be watched again."""
        open_shares, group = self._spine.origins.open_shares, self._spine.group
        tensors = [(other, *named) for other in open_shares for named in other.of.tensors()]
        dims = (tensor.dim() for *_, tensor in tensors)
        self._kind_of_loop = kind = (share.of.training, torch.is_grad_enabled(), line_of_draw(), *dims)
        is_alike = all(
            other.rows == share.rows and (other is share or not other.of.ragged) for other in open_shares
        )
        # a microbatch is not shared
        can_be = 0 < share.mine < share.all and share.microbatches == 1 and not self.is_compiled
        # before a restart the remarks were printed
        is_of_use = share.of.training and not group.restarts
        if is_of_use and self._again.is_due(self._spine.batches, share.all):
            self._watched_kinds.discard(kind)
        if kind in self._watched_kinds or not (is_alike and can_be):
            return
        self._watched_kinds.add(kind)
        if not (self.finds_draws or is_of_use):
            return
        if not self._before_loop:
            tensors_now = (each for each in alive(torch.Tensor, group.hidden) if type(each) in _PLAIN)
            older = {memory_of(tensor): weakref.ref(tensor) for tensor in tensors_now}
            of_batches = set(map(memory_of, self._spine.origins.handed_out()))
            self._before_loop = {memory: older[memory] for memory in older.keys() - of_batches}
        inputs = [(tensor, None if of is share else Place(of.dim_in(name))) for of, name, tensor in tensors]
        self._losses_to_watch = _MOST_LOSSES
        self._loop_places = self.places = watched = self._places_for(share, inputs)
        watched.__enter__()  # type: ignore[no-untyped-call]

    def _places_for(self, share: Share, inputs: Sequence[tuple[torch.Tensor, Place | None]]) -> BatchPlaces:
        """What follows the operations of the loop's batch at hand until the loop is left."""

        def is_paused() -> bool:
            is_over = self._loop_places is not watched or os.getpid() != self._pid
            return is_over or self._spine.is_reading or self._spine.group.phase[0] in _IN_BACKWARD

        def is_older(tensor: torch.Tensor) -> bool:
            return self.is_older(tensor, share)

        def is_new(tensor: torch.Tensor) -> bool:
            if not self.finds_draws or is_older(tensor):
                return False
            with suppress(Exception):  # the script must not fail because of a remark
                self._beside.note_new(tensor, share.mine)
            return True

        def note(func: Any, operands: Sequence[Traced]) -> None:
            with suppress(Exception):
                self._beside.note(func, operands, share.mine if self.finds_draws else 0, is_older)

        parameters = self._spine.models.parameters()
        joined = self._spine.origins.is_joined
        watched = BatchPlaces(share, inputs, parameters, is_paused, is_new, joined, note)
        return watched

    def _leave_loop(self) -> None:
        """Stop watching the batch; is_paused() keeps its mode inactive until it can be taken off."""
        if self._loop_places is not None:
            self._over.append(self._loop_places)
            self._loop_places = self.places = None
        # torch keeps a mode half alive that is taken off inside inference_mode() and was put on outside of it
        if self._over and not torch.is_inference_mode_enabled():
            modes = _get_current_dispatch_mode_stack()
            while self._over and modes and modes[-1] is self._over[-1]:
                modes.pop()
                self._over.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def backward_begins(self, loss: torch.Tensor) -> None:
        spine, watched = self._spine, self._loop_places
        self._beside.has_compared |= watched is not None
        # other ranks follow a batch by default only to compare what is beside it
        followed = watched if self.finds_draws or spine.group.world.rank == 0 else None
        spine.loss = followed.averaged(loss) if followed is not None else None
        if followed is not None and not spine.weighed_by:
            spine.weighed_by = followed.weighed_by
        if spine.loss is not None and spine.loss.does:
            how = "add that up with samestep.sum" if spine.loss.sums else "average over it with samestep.mean"
            spine.group.say(
                f"what {spine.loss.does} has only this rank's samples, so the loss is not the serial script's: first "
                f"join the batch with samestep.gather(...), or {how}(...)",
                what="mixed samples",
            )
        if not self.finds_draws and watched is not None and watched.drawn_whole_at:
            spine.group.say(
                f"{watched.drawn_whole_at} draws as many rows as the whole batch has, and each rank draws others, so "
                "that their number grows with the ranks: draw as many as the batch has here, as in "
                "torch.randn(len(x), 8), or use samestep run --same",
                what="noise of a fixed size",
            )
        if self.finds_draws and watched is not None and watched.drawn_at:
            self._drawn_at = watched.drawn_at
            self._remark_drawn()
        # later losses of this batch, as of a GAN's generator, may mix samples too
        self.places, self._losses_to_watch = None, self._losses_to_watch - 1
        if self._losses_to_watch <= 0:
            self._leave_loop()
        self._again.loss_made(spine.batches)

    def _remark_drawn(self, *_: Any) -> None:
        """Print a remark on draws for samples in another order; a rank may have them in order by chance."""
        self._spine.group.say(
            f"what {self._drawn_at or 'another rank'} draws for samples that were sorted, or moved otherwise, is not "
            "the serial script's under same=True: their places in the whole batch are not known; sort in the "
            "collate_fn, which gets the whole batch",
            what="drawn for moved",
        )

    def slopes_given(self, given: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor | None], bool]) -> None:
        if self._loop_places is not None:
            self._loop_places.mark_slopes(*given)

    def gathered(self, own: torch.Tensor) -> None:
        place = self.places.place(own) if self.places is not None else None
        if place is not None and place.dim == 0 and place.before > 1:
            self._spine.group.say(
                f"samestep.gather ({users_line()}) joins {place.before} views of the batch that lie one after another, "
                "and each rank's views come one after another, so the views are mixed; gather each of them, as in "
                f"torch.cat([samestep.gather(view) for view in out.chunk({place.before})])",
                what="views gathered",
            )

    def pass_left(self, left: Pass) -> None:
        self._leave_loop()


def _has_compiled() -> bool:
    backends = getattr(sys.modules.get("torch._dynamo.eval_frame"), "cached_backends", {})
    return any(backend is not None for backend in backends.values())


def _times(tensor: torch.Tensor, place: Place | None, mine: int) -> int:
    """How many times a tensor has the batch, concatenated; 0 where it does not have it."""
    if place is not None:
        return 0 if place.dim is None else place.before * place.after
    is_several = mine and tensor.dim() and mine not in tensor.shape[:2] and not tensor.shape[0] % mine
    return tensor.shape[0] // mine if is_several else 1
