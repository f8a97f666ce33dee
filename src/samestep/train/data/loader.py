"""`samestep.loader`: iterates this rank's share of every batch of the serial script, on this rank's device.

Example: with batch_size=8 on 3 ranks, the batch of the samples 0 to 7 becomes 0 to 2, 3 to 5 and 6 to 7. A position is
counted in samples of all ranks, so a state continues on any number of ranks.
"""

import hashlib
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, Unpack

import torch
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from samestep.errors import UsageError
from samestep.train.data import share, source
from samestep.train.data.batches import Batch, Planned, on_device
from samestep.train.data.order import Drawn, Taken, TakenBatches
from samestep.train.data.share import Piece, Pieces
from samestep.train.data.source import Data, Item, Options
from samestep.train.data.stream import Reading, Stream
from samestep.train.draws.draws import Draws
from samestep.train.forgotten import Begun, Evaluations
from samestep.train.group.device import SideStreams, moved, overlaps
from samestep.train.group.group import Group
from samestep.train.group.world import joined
from samestep.train.meter import Meter
from samestep.train.optimizers import Optimizers
from samestep.train.passes import Pass, Share
from samestep.train.step import Spine


def loader(
    dataset: "Data[Item] | DataLoader[Item]",
    batch_size: int | None = None,
    shuffle: bool = False,
    *,
    drop_last: bool = False,
    seed: int | None = None,
    **options: Unpack[Options],
) -> "Loader[Item]":
    """Collective. Iterate a dataset in batches: each rank gets its share of every batch, on its own device.

    dataset: anything with __len__ and __getitem__, or a torch IterableDataset, which every rank reads; the same on
        every rank. Or a torch DataLoader, alone: its data set, batches, collate function and workers are taken.
    batch_size: samples of one optimizer step, as in the serial script. The ranks share them.
    shuffle: take the samples in another order in each epoch. Default False.
    drop_last: leave out a last batch that is smaller. Default False.
    seed: of the order, and of what samples draw at random. Default None: the order is drawn from the script's own
        random stream, as torch's DataLoader draws it.
    **options: passed on to torch's DataLoader, with its defaults: num_workers, collate_fn, sampler, batch_sampler, …
        num_workers="auto" makes as many as this process has cores to itself (on CPU one less). on_device=False
        leaves batches where the samples are, for a script that uses them before it moves them.

    Returns a Loader. Iterate it for batches; `len()` is the number of steps; `epochs(n)` gives the epochs still to
    do; `state_dict()` says where it is. Each pass is the next epoch. Raises UsageError if an argument cannot be used,
    RanksDiffer if the ranks gave different data or options.

        train = samestep.loader(dataset, batch_size=64, shuffle=True)
        for x, y in train:
            ...
    """
    chosen: dict[str, Any] = {"shuffle": shuffle, "drop_last": drop_last, **options}
    data: Any = dataset
    if isinstance(dataset, DataLoader):
        given = {name: value for name, value in chosen.items() if value is not False}
        given |= {} if batch_size is None else {"batch_size": batch_size}
        chosen = source.taken_over(dataset, given)
        data, batch_size = dataset.dataset, chosen.pop("batch_size")
    shuffle, drop_last = chosen.pop("shuffle"), chosen.pop("drop_last")
    result: Loader[Any] = Loader(data, batch_size, shuffle, drop_last, seed, chosen, joined())
    return source.agree("samestep.loader", result, joined())


class Loader(Generic[Item]):
    """Iterates a dataset in batches; its position is counted in samples of all ranks."""

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None,
        shuffle: bool,
        drop_last: bool,
        seed: int | None,
        options: dict[str, Any],
        group: Group,
    ) -> None:
        world = group.world
        self._device = world.device if options.pop("on_device", True) else torch.device("cpu")
        source.check_options(options)
        source.check_batched(batch_size, options)
        if options.get("batch_sampler") is None:
            share.check_batch_size(batch_size := share.as_int(batch_size), world.size)
            batch_size *= world.size if os.environ.get("SAMESTEP_WEAK") else 1
        if seed is not None and type(seed := share.as_int(seed)) is not int:
            raise UsageError(f"seed {seed!r} is not an integer; write for instance seed=0")
        source.check_dataset(dataset)
        self._given = {**options}
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.epoch = self._position = self._passes = 0
        self._repeated = 0  # batches of a cycle
        self._share: float = 1.0 / world.size
        self._begun = self._is_counted = self.is_share_read = False
        # the latest pass that no cycle repeats, the epochs begun before it, and whether it is inside of a step
        self._latest: tuple[Pass, int, bool] | None = None
        self.ledger = b""
        self._group, self._world, self._spine, self._draws = group, world, group.the(Spine), group.the(Draws)
        self._spine.subscribe(group.the(Meter))
        group.the(Optimizers)
        if world.size > 1:
            group.the(Evaluations)
        self._on_epoch_end: list[Callable[[bool], None]] = []
        self._shuffle, self._seed, self._sampler = shuffle, seed, options.get("sampler")
        self._reads_ahead = source.reads_ahead(options)
        self._keeps_workers = self._reads_ahead and bool(options.get("persistent_workers"))
        # elsewhere torch may fail at pinning
        self._pins = overlaps(world.device) and bool(options.get("pin_memory", self._device == world.device))
        options["pin_memory"] = self._pins
        self._order = source.order_of(dataset, batch_size, shuffle, drop_last, seed, options, group)
        self._source = None if isinstance(self._order, Stream) else source.source_of(dataset, options, world)
        self.spare_workers = source.spare_workers(self._source, world)
        self._given |= {"num_workers": options.get("num_workers", 0), "pin_memory": self._pins}

    @property
    def share(self) -> float:
        """This rank's part of the batch handed out last; the parts of all ranks add up to 1."""
        self.is_share_read = True
        return self._share

    @property
    def sampler(self) -> Any:
        """The script's sampler, or the sampler that torch's DataLoader would have made; scripts use its length."""
        if self._sampler is not None:
            return self._sampler
        if not self._shuffle:
            return SequentialSampler(self.dataset)
        return RandomSampler(self.dataset, generator=self._given.get("generator"))

    if not TYPE_CHECKING:  # a type checker has to find misspelt names

        def __getattr__(self, name: str) -> Any:
            return source.of_dataloader(self, name)

    def __len__(self) -> int:
        return self._order.count(self.batch_size, drop_last=self.drop_last)

    def __iter__(self) -> Iterator[Item]:
        return self._new_pass()

    def cycle(self) -> Iterator[Item]:
        """The batches of one pass, again and again, as `itertools.cycle` repeats those of torch's DataLoader."""
        kept: list[Any] = []
        return self._cycle(self._new_pass(kept), kept)

    def _new_pass(self, kept: list[Any] | None = None) -> Iterator[Item]:
        """A pass; with `kept`, read from its beginning also after a resume, as the batches will be repeated."""
        spine = self._spine
        if self._begun:
            self._enter(self.epoch + 1)
        self._begun = True
        self._order.begin(again=self._keeps_workers and self._passes > 0)
        self._passes += 1
        start = self._position if kept is None else 0
        this = Pass(self, self.epoch, start, training=spine.is_training(self._shuffle))
        is_inside = any(share.of.training for share in spine.origins.open_shares if share.of.of is not self)
        self._latest = (this, spine.epochs_begun, is_inside) if kept is None else None
        at_once = self._reads_ahead or self._order.draws_at_iter
        return self._walk(this, self._draw_order(this) if at_once else None, kept)

    def _cycle(self, batches: Iterator[Item], kept: list[Any]) -> Iterator[Item]:
        spine = self._spine
        yield from batches

        def handed_out(this: Pass) -> Iterator[tuple[Item, Share]]:
            rest = kept[self._repeated % len(kept) :]
            for batch, given, ragged, self._share, _ in rest:
                self._repeated += 1
                this.note(given.all)
                own = replace(given, of=this, step=spine.steps)
                spine.hand_out(own, batch, ragged)
                yield batch, own

        while kept:
            this = Pass(self, self.epoch, 0, training=spine.is_training(self._shuffle))
            _, given, _, _, order = kept[0]  # a pass does not keep its order alive
            this.take_order(order, given.of.seed)
            spine.begin_pass(this)
            yield from spine.stepped(this, handed_out(this))

    def epochs(self, count: int) -> Iterator[int]:
        """The remaining epochs of `count` in all, beginning with the epoch in which this loader is."""
        first = self.epoch + self._begun
        if type(count := share.as_int(count)) is not int:
            raise UsageError(f"epochs({count!r}) is not a number of epochs; write an integer, as epochs(10)")
        self._group.the(Meter).planned = count
        for epoch in range(first, count):
            if epoch > first or self._begun:
                self._enter(epoch)
            self._is_counted, self._begun = True, False
            self._end_epoch(is_last=False)
            yield epoch
        self._enter(max(count, self.epoch))
        self._is_counted = self._begun = False
        self._end_epoch(is_last=True)

    @property
    def is_between(self) -> bool:
        """Whether the loop over `epochs` has left the loop over this epoch's batches."""
        return self._is_counted and self._begun and self._latest is not None and self._latest[0].is_left

    def _enter(self, epoch: int) -> None:
        self._order.skip(self.epoch)
        self.epoch, self._position, self._repeated = epoch, 0, 0

    def _end_epoch(self, *, is_last: bool) -> None:
        self._spine.epochs_begun += 1
        for call in self._on_epoch_end:
            call(is_last)

    def keep_ledger(self, on_epoch_end: Callable[[bool], None]) -> None:
        """From now on keep a digest of the consumed samples in the state; tell each end of an epoch, and the last."""
        self.ledger = self.ledger or bytes(32)
        self._on_epoch_end.append(on_epoch_end)

    def fingerprint(self) -> str:
        return source.fingerprint(self._source, self.dataset)

    def state_dict(self) -> dict[str, Any]:
        """The position of this loader: the epoch, and its samples that were handed out on all ranks."""
        ledger = {"ledger": self.ledger} if self.ledger else {}
        epoch, position = (self.epoch + 1, 0) if self._is_over() else (self.epoch, self._position)
        order = self._order.kept(position) if position else {}
        repeated = {"repeated": self._repeated} if position and self._repeated else {}
        return {"epoch": epoch, "position": position, **repeated, **order, **ledger, **self.facts()}

    def _is_over(self) -> bool:
        """Whether a resume begins the next epoch: after an evaluation, or where it does not come to this loop again."""
        if self._latest is None or not self._begun:
            return False
        latest, epochs_begun, is_inside = self._latest
        return latest.is_left and (
            latest.is_evaluated or is_inside or epochs_begun < self._spine.epochs_begun
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the state was taken, at any number of processes."""
        facts = self.facts()
        if missing := sorted({"epoch", "position", *facts} - state.keys()):
            raise UsageError(
                f"this state has no {', '.join(missing)}; give what a loader's state_dict returned"
            )
        if not 0 <= int(state["position"]) <= state.get("length", math.inf):
            raise UsageError(
                f"this state's position {state['position']} is outside its {state.get('length')} samples; give what a "
                "loader's state_dict returned"
            )
        for name, value in facts.items():
            if state[name] != value:
                raise UsageError(
                    f"this loader's {name} is {value} and the state's is {state[name]}; use the same"
                )
        self.epoch, self._position = int(state["epoch"]), int(state["position"])
        self._repeated = int(state.get("repeated", 0))
        self._begun = False
        self.ledger = state.get("ledger", self.ledger)
        self._order.go_on(state)

    def facts(self) -> dict[str, Any]:
        return {
            **self._order.facts(),
            "batch_size": self.batch_size,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "drop_last": self.drop_last,
        }

    def _begin(self, this: Pass) -> Iterable[Any]:
        """The steps of a pass whose first batch is asked for."""
        # replicate may have been called since `iter`
        this.training = self._spine.is_training(self._shuffle)
        if this.training and self._shuffle and self._seed is not None and not (this.epoch or this.start):
            self._group.the(Begun).note(self, self.dataset, self._seed)
        self.is_share_read = False  # in this pass
        steps = self._steps(this) if self._order.length is not None else ()
        self._spine.begin_pass(this)
        return steps

    def _steps(self, this: Pass) -> Iterable[Any]:
        size, rank = self._world.size, self._world.rank
        serial, even = (self._pieces(this, size, rank, even=even) for even in (False, True))
        this.batches = len(serial)

        def is_even() -> bool:
            if this.derives_weights and not this.training and serial.last_sizes != even.last_sizes:
                self._group.say(share.differing(serial, even, size))
            # same=True needs the serial script's batches for its draws, and a backward needs all ranks
            return not this.training and (this.has_backward or not self._draws.active)

        return share.pieces(serial, even, is_even)

    def _pieces(self, this: Pass, size: int, rank: int, *, even: bool = False) -> Pieces:
        cuts: Any = {"start": this.start, "drop_last": self.drop_last, "even": even}
        return Pieces(self._order.length or 0, self.batch_size or 1, size, rank, **cuts)

    def _pieces_of(self, order: TakenBatches | Reading, start: int) -> Iterator[Piece]:
        for stop in self._in_phase_data(order.stops(start)):
            yield share.piece(start, stop, self._world.size, self._world.rank)
            start = stop

    def _draw_order(self, this: Pass) -> Drawn:
        lazily = self._world.size == 1 or self._draws.active
        order = self._order.draw(this.epoch, alike=this.training, lazily=lazily)
        this.take_order(order, self._order.pass_seed)
        return order

    def _walk(self, this: Pass, drawn: Drawn | None, kept: list[Any] | None) -> Iterator[Any]:
        """The batches of a pass; `kept` gets them all, also those that were consumed before a resume."""
        steps, known = self._begin(this), self._position
        order = self._draw_order(this) if drawn is None else drawn
        pieces = self._pieces_of(order, this.start) if isinstance(order, TakenBatches | Reading) else steps
        ahead, steps_to_take = itertools.tee(pieces)
        batches = self._read(order, ahead, this)

        def handed_out() -> Iterator[tuple[Any, Share]]:
            for step in steps_to_take:
                for batch, own in self._handed_out(step, batches, this):
                    if kept is not None:
                        kept.append((batch, own, this.ragged, self._share, order))
                    if own.batch_start >= known:
                        self._consume(order, own)
                        yield batch, own
            next(batches, None)
            if isinstance(order, Taken):
                order.end()

        yield from self._spine.stepped(this, handed_out())
        this.is_evaluated = not torch.is_grad_enabled()

    def _planned(self, order: Drawn, piece: Any, this: Pass) -> Iterator[Planned]:
        """The samples to read for a batch; none in an evaluation if this rank has no share of it."""
        # a sampler is asked for the whole batch, as torch does, whatever this rank's share is
        samples = order[piece.start : piece.stop]
        mine = slice(piece.mine_start - piece.start, piece.mine_stop - piece.start)
        collates = self._source is None or self._source.collates
        if self._draws.active and collates and 0 < piece.mine < piece.all:
            # a collate_fn may pad a sample to the longest sample of the whole batch
            yield samples, mine
        elif piece.mine or this.training:
            yield samples[mine] if piece.mine else samples, None

    def _handed_out(self, piece: Any, batches: Iterator[Batch], this: Pass) -> Iterator[tuple[Any, Share]]:
        """A batch and this rank's share; in training a rank without a share gets the whole batch with weight 0."""
        self._share = share.weight(piece, self._order.length, self.batch_size or 1)
        this.note(piece.all)
        if piece.mine or this.training:
            batch, ragged = next(batches)
            lent, step = not piece.mine, self._spine.steps
            own = Share(this, piece.start, piece.mine_start, piece.mine, piece.all, lent=lent, step=step)
            self._spine.hand_out(own, batch, ragged)
            yield batch, own
        self._position = piece.stop
        if self._draws.active and not this.training and piece.all < self._world.size:
            # ranks without a share of the batch drew nothing for it
            self._draws.adopt_first()

    def _consume(self, order: Drawn, given: Share) -> None:
        self._position = given.batch_start + given.all
        if self.ledger:
            samples = order[given.batch_start : self._position].numpy().tobytes()
            self.ledger = hashlib.blake2b(self.ledger + samples, digest_size=32).digest()

    def _read(self, order: Drawn, steps: Iterator[Any], this: Pass) -> Iterator[Batch]:
        reads = order if isinstance(order, Reading) else self._source
        assert reads is not None
        # copy the indices to the data's device once for the pass, not in every step
        near = moved(order, reads.device) if isinstance(order, torch.Tensor) else order
        plan = (planned for step in steps for planned in self._planned(near, step, this))
        # a sampler, a stream or a collate_fn may draw between the draws of the loop, as under torch's DataLoader
        draws = not isinstance(order, torch.Tensor) or self._source is None or self._source.collates
        side = None if draws and not self._reads_ahead else self._group.the(SideStreams).of_copies
        batches = reads.batches(plan, this.epoch, this.seed)
        return self._in_phase_data(on_device(batches, self._device, side, pins=self._pins))

    def _in_phase_data(self, items: Iterator[Any]) -> Iterator[Any]:
        """Yield the items; while one is read, its random draws are not the script's."""
        while True:
            before, self._spine.is_reading = self._spine.is_reading, True
            self._group.enter("data")
            try:
                item = next(items)
            except StopIteration:
                return
            finally:
                self._spine.is_reading = before
            yield item
