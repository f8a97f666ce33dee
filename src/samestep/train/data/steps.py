"""`samestep.steps`: iterates optimizer steps, and in each step this rank's microbatches of the whole batch.

Example: a batch of 8 samples with microbatch=2 has 4 microbatches. With 3 ranks, rank 0 has the microbatches 0 and 1,
rank 1 has 2, and rank 2 has 3.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Generic, Unpack

from torch.utils.data import DataLoader, IterableDataset

from samestep.errors import UsageError
from samestep.train.data.batches import Batch, Planned
from samestep.train.data.loader import Loader
from samestep.train.data.order import Drawn
from samestep.train.data.share import Piece, as_int
from samestep.train.data.source import Data, Item, Options, agree
from samestep.train.group.world import joined
from samestep.train.passes import Pass, Share, cut
from samestep.train.subscriber import Subscriber


def steps(
    dataset: Data[Item],
    batch_size: int,
    *,
    microbatch: int,
    shuffle: bool = False,
    drop_last: bool = False,
    seed: int | None = None,
    **options: Unpack[Options],
) -> "Steps[Item]":
    """Collective. Iterate optimizer steps; each step iterates this rank's microbatches of one batch.

    Call `backward()` on the mean loss of each microbatch, undivided. After the last one every rank has the gradient
    of the mean loss over the whole batch.

    microbatch: samples of one microbatch, at most batch_size; a step must have one for each rank.
    The other arguments are those of `loader`.

    Returns Steps: a Loader of steps. Raises what `loader` raises.

        for step in samestep.steps(dataset, batch_size=64, microbatch=8, shuffle=True):
            for x, y in step:
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    """
    if isinstance(dataset, DataLoader):
        raise UsageError("steps got a DataLoader; write steps(dl.dataset, batch_size=..., microbatch=...)")
    if isinstance(dataset, IterableDataset) or options.get("batch_sampler") is not None:
        raise UsageError(
            "steps needs to know the batches of a pass before it begins; use samestep.loader for a stream or a "
            "batch_sampler"
        )
    result: Steps[Item] = Steps(
        dataset, batch_size, microbatch, shuffle, drop_last, seed, dict(options), joined()
    )
    return agree("samestep.steps", result, joined())


class Steps(Loader["Step[Item]"], Generic[Item]):
    """A loader of steps; `share` is the last microbatch's part of its step."""

    def __init__(self, dataset: Any, batch_size: int, microbatch: int, *others: Any) -> None:
        super().__init__(dataset, batch_size, *others)
        batch_size, self.microbatch = self.batch_size or 1, as_int(microbatch)
        if type(self.microbatch) is not int or not 1 <= self.microbatch <= batch_size:
            raise UsageError(
                f"microbatch {microbatch!r} is not a part of batch_size {batch_size}; "
                f"use 1 to {batch_size} samples"
            )
        count, size = -(-batch_size // self.microbatch), self._world.size
        if count < size:
            raise UsageError(
                f"batch_size {batch_size} in microbatches of {microbatch} is {count}, fewer than the "
                f"{size} ranks that share them; use microbatch={batch_size // size}, or fewer processes"
            )

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "microbatch": self.microbatch}

    def _steps(self, this: Pass) -> Sequence["Step[Item]"]:
        """The steps of a pass; a rank without a share of a small last batch gets a lent microbatch."""
        if self._draws.active and this.training:
            raise UsageError(
                "samestep.steps cannot draw the serial script's numbers for same=True; use replicate(exact=True) with "
                "steps, or same=True with samestep.loader"
            )
        steps: list[Step[Item]] = [Step(self, this, piece) for piece in self._pieces(this, 1, 0)]
        this.batches, this.microbatches = len(steps), {step.count for step in steps} or {1}
        return steps

    def _planned(self, order: Drawn, step: "Step[Item]", this: Pass) -> Iterator[Planned]:
        return ((order[start:stop], None) for start, stop in step.parts)

    def _handed_out(
        self, step: "Step[Item]", batches: Iterator[Batch], this: Pass
    ) -> Iterator[tuple["Step[Item]", Share]]:
        step.number, step.batches = self._spine.steps, batches
        yield step, step.share()
        step.skip_rest()


class Step(Generic[Item]):
    """One optimizer step: iterate it once for this rank's microbatches."""

    batches: Iterator[Batch]
    number: int

    def __init__(self, loader: Steps[Item], this: Pass, piece: Piece) -> None:
        world = loader._world
        self.piece = piece
        self._loader, self._spine, self._pass = loader, loader._spine, this
        self.count = -(-piece.all // loader.microbatch)
        self._indices = range(*cut(self.count, world.size, world.rank))
        self._lent = this.training and not self._indices
        self.parts = [
            (
                piece.start + index * loader.microbatch,
                min(piece.start + (index + 1) * loader.microbatch, piece.stop),
            )
            for index in self._indices
        ] or [(piece.start, min(piece.start + loader.microbatch, piece.stop))] * self._lent
        self._left, self._taken = len(self.parts), False

    def __len__(self) -> int:
        return len(self.parts)

    def __iter__(self) -> Iterator[Item]:
        if self._taken:
            raise UsageError(
                "this step was iterated already, and its microbatches are gone; iterate each step once"
            )
        self._taken = True
        for number, index in enumerate(self._indices or range(self._lent)):
            self._left -= 1
            batch, _ = next(self.batches)
            microbatch = self.share(number, index)
            self._loader._share = microbatch.mine / microbatch.all
            self._spine.hand_out(microbatch, batch)
            self._spine.tell(Subscriber.microbatch_begins, microbatch)
            yield batch
            self._spine.tell(Subscriber.microbatch_ends, microbatch)
        self._pass.latest = self.share()

    def share(self, number: int | None = None, index: int | None = None) -> Share:
        """This rank's part of the step, or of its own microbatch `number`, which is microbatch `index` of the step."""
        mine = self.parts if number is None else self.parts[number : number + 1]
        return Share(
            self._pass,
            self.piece.start,
            mine[0][0] if mine else self.piece.start,
            0 if self._lent else sum(stop - start for start, stop in mine),
            self.piece.all,
            lent=self._lent,
            microbatch=index,
            microbatches=self.count,
            first=not number,
            last=number is None or number == len(self.parts) - 1,
            step=self.number,
        )

    def skip_rest(self) -> None:
        """Read the microbatches that the loop did not take, so that the next step does not get them."""
        while self._left:
            self._left -= 1
            next(self.batches)
