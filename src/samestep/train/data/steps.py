"""An optimizer step as named parts: each process iterates its own microbatches of a batch shared by all."""

from collections.abc import Iterator, Sequence
from typing import Any

from samestep.errors import UsageError
from samestep.train.data import share
from samestep.train.data.loader import Loader, agree, as_int
from samestep.train.group.world import World, init
from samestep.train.meter import count_step
from samestep.train.model import replicate
from samestep.train.model.divergence import compare_replicas
from samestep.train.model.exact import in_exact_run
from samestep.train.model.replica import Replica, replicas
from samestep.train.streams import draw_as


def steps(
    dataset: Any,
    batch_size: int,
    *,
    microbatch: int,
    shuffle: bool = False,
    drop_last: bool = False,
    seed: int = 0,
    **options: Any,
) -> "Steps":
    """Collective. Iterates optimizer steps, each of which iterates this rank's microbatches of the batch.

    After the last one the gradient is that of the whole batch's mean loss; call `loss.backward()` on the
    mean over the microbatch, undivided.
    """
    return agree(
        "samestep.steps", Steps(dataset, batch_size, microbatch, shuffle, drop_last, seed, options, init())
    )


class Steps(Loader):
    """Batches in microbatches; where it is, is said in samples, as for a loader."""

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        microbatch: int,
        shuffle: bool,
        drop_last: bool,
        seed: int,
        options: dict[str, Any],
        world: World,
    ) -> None:
        batch_size, microbatch = as_int(batch_size), as_int(microbatch)
        share.check_batch_size(batch_size, world.size)
        if type(microbatch) is not int or not 1 <= microbatch <= batch_size:
            raise UsageError(
                f"microbatch {microbatch!r} is no part of batch_size {batch_size}; "
                f"use 1 to {batch_size} samples"
            )
        count = -(-batch_size // microbatch)
        if count < world.size:
            raise UsageError(
                f"batch_size {batch_size} in microbatches of {microbatch} is {count}, fewer than the "
                f"{world.size} ranks that share them; use microbatch={batch_size // world.size}, "
                "or fewer processes"
            )
        self.microbatch = microbatch
        super().__init__(dataset, batch_size, shuffle, drop_last, seed, options, world)

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "microbatch": self.microbatch}

    def _pass(self, training: bool) -> Iterator["Step"]:
        """One way through; a rank without a share of a tiny last batch takes it on a lent microbatch."""
        epoch = self.epoch
        if training:
            replicate.weigh_alone()
        pieces = list(
            share.pieces(self._length, self.batch_size, 1, 0, start=self._position, drop_last=self.drop_last)
        )
        order = self._order.draw(epoch, alike=training)
        with share.open_pass(self, order) as this:
            this.training = training
            made = [Step(self, piece, this, epoch, training) for piece in pieces]
            plan = (order[start:stop] for step in made for start, stop in step.parts)
            batches = self._on_device(plan, epoch)
            for step in made:
                self._hand_out(order, step.piece)
                if training:
                    compare_replicas(count_step(epoch))
                step.batches = batches
                yield step
                step.skip_rest()
        if training:
            replicate.settle_all()


class Step:
    """One optimizer step: iterate it once for this rank's microbatches."""

    batches: Iterator[Any]

    def __init__(self, of: Steps, piece: share.Piece, this: share.Pass, epoch: int, training: bool) -> None:
        world = of._world
        self.piece = piece
        self.count = -(-piece.all // of.microbatch)
        self._indices = range(*share.cut(self.count, world.size, world.rank))
        self._of, self._this, self._epoch, self._training = of, this, epoch, training
        self._lent = training and not self._indices
        self.parts = [
            (piece.start + index * of.microbatch, min(piece.start + (index + 1) * of.microbatch, piece.stop))
            for index in self._indices
        ] or [(piece.start, min(piece.start + of.microbatch, piece.stop))] * self._lent
        self._left, self._taken = len(self.parts), False

    def __len__(self) -> int:
        return len(self.parts)

    def __iter__(self) -> Iterator[Any]:
        if self._taken:
            raise UsageError(
                "this step was iterated already; iterate each step once, its microbatches are gone"
            )
        self._taken = True
        exact = self._training and in_exact_run()
        held = replicas() if self._training else []
        for replica in held:
            replica.begin_step()
        this = self._this
        try:
            yield from self._microbatches(exact, held)
        finally:
            this.index = None
        this.mine = 0 if self._lent else sum(stop - start for start, stop in self.parts)
        for replica in held:
            replica.end_step(this)
        if exact:
            draw_as(self._of._seed, self._epoch, self.piece.start, "after")

    def _microbatches(self, exact: bool, held: Sequence[Replica]) -> Iterator[Any]:
        this = self._this
        for index, (start, stop) in zip(self._indices or range(self._lent), self.parts, strict=True):
            self._left -= 1
            batch = next(self.batches)
            this.index, this.count, this.last = index, self.count, not self._left
            this.take(start, 0 if self._lent else stop - start, self.piece.all, self._lent)
            if exact:
                draw_as(self._of._seed, self._epoch, self.piece.start, index)
            yield batch
            for replica in held:
                replica.end_microbatch(this)

    def skip_rest(self) -> None:
        """What the loop did not take must not be the next step's."""
        while self._left:
            self._left -= 1
            next(self.batches)
