"""All replicas of a group: what they do together at passes, and which of their buffers have to be made equal."""

import json
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from samestep.errors import UsageError
from samestep.train.group.group import Group, Member
from samestep.train.model.exchange import Exchange, times_of
from samestep.train.model.replica import Replica
from samestep.train.step import Pass, Share, Spine, Subscriber
from samestep.train.streams import draw_as


class Replicas(Member, Subscriber):
    """All replicas of a group, in the order they were made, which is the same on every rank."""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self._unlike_said = False
        self.alone: weakref.WeakKeyDictionary[torch.nn.Module, bool] = weakref.WeakKeyDictionary()
        self._living: weakref.WeakSet[Replica] = weakref.WeakSet()
        self._made = 0
        self._any_moves_buffers = self._buffer_said = False
        group.the(Spine).subscribe(self)

    def __iter__(self) -> Iterator[Replica]:
        return iter(sorted(self._living, key=lambda replica: replica.number))

    @property
    def exact(self) -> bool:
        """Whether gradients are added in the fixed tree."""
        return any(replica.exchange.needs_microbatches for replica in self._living)

    def add(self, model: torch.nn.Module, options: dict[str, Any], exchange: Exchange) -> None:
        """Collective. Make this model a replica."""
        replica = Replica(self._made, model, options, exchange, self.group, self._remark_unlike_shares)
        self._made += 1
        self._any_moves_buffers |= replica.moves_buffers
        self._living.add(replica)

    def _remark_unlike_shares(self) -> None:
        if not self._unlike_said and self.group.the(Spine).has_unlike_shares() and self.group.world.rank == 0:
            self._unlike_said = True
            print(
                "samestep: two loaders are iterated together and split their batches differently; the model's input is "
                "computed from a batch, so its gradients use the share of the latest training batch: let one dataset "
                "return both",
                file=sys.stderr,
            )

    def trains(self, shuffled: bool) -> bool:
        return any(replica.model.training for replica in self._living) or (shuffled and bool(self._living))

    def parameters(self) -> Iterator[torch.Tensor]:
        return (parameter for replica in self for parameter in replica.model.parameters())

    def exchanges(self) -> Iterator[tuple[float, float]]:
        return (times_of(replica.ddp) for replica in self if replica.ddp is not None)

    @property
    def adds_losses(self) -> bool:
        return any(replica.exchange.sums for replica in self._living)

    def pass_begins(self, begun: Pass) -> None:
        """In a world of one a model is left as it is, until its microbatches have to be weighed."""
        if not begun.training or not begun.microbatches:
            return
        for model, sums in list(self.alone.items()):
            del self.alone[model]
            self.add(model, {}, Exchange(sums=sums))
        size = self.group.world.size
        uneven = next((count for count in begun.microbatches if count % size), None)
        if uneven is not None and any(replica.has_synced_statistics for replica in self):
            raise UsageError(
                f"a step of {uneven} microbatches gives the {size} ranks unequal numbers of them, and a BatchNorm "
                "over all ranks needs equal ones; choose a batch_size and a microbatch whose numbers divide evenly, "
                "with drop_last=True, or leave sync_batchnorm out"
            )

    def microbatch_begins(self, share: Share) -> None:
        if share.of.training:
            for replica in self:
                replica.exchange.microbatch_begins(share)
            if self.exact:
                draw_as(share.of.seed, share.of.epoch, share.batch_start, share.microbatch or 0)

    def microbatch_ends(self, share: Share) -> None:
        if share.of.training:
            for replica in self:
                replica.exchange.microbatch_ends(share)
            if self.exact and share.last:
                draw_as(share.of.seed, share.of.epoch, share.batch_start, "after")

    def pass_ends(self, ended: Pass) -> None:
        if ended.training:
            self.settle()

    def settle(self) -> None:
        """Collective. Make rank 0's buffers everyone's, where training has moved them apart."""
        if not self._any_moves_buffers:
            return
        mine = [(replica.number, [replica.dirty, replica.own_sums()]) for replica in self]
        ranks = self.group.all_gather("samestep.replicate's buffers", json.dumps(mine).encode())
        for replica, facts in self.alive_everywhere([dict(json.loads(rank)) for rank in ranks]):
            if any(dirty for dirty, _ in facts):
                self._say_own_buffer(replica, [sums for _, sums in facts])
                replica.share_buffers()

    def _say_own_buffer(self, replica: Replica, ranks: Sequence[str]) -> None:
        """Name a buffer, other than BatchNorm's, that training changes from each rank's share alone."""
        if len(set(ranks)) == 1 or self._buffer_said or self.group.world.rank:
            return
        self._buffer_said = True
        others = next(sums for sums in ranks if sums != ranks[0])
        names = list(replica.own_buffers())
        at = next(at for at in range(len(names)) if ranks[0][16 * at :][:16] != others[16 * at :][:16])
        print(
            f"samestep: forward changes the buffer {names[at]} of {type(replica.model).__name__} from each rank's "
            "share alone, and rank 0's is kept; take samestep.mean(...) of what it is made of, or use "
            "replicate(exact=True) with steps",
            file=sys.stderr,
        )

    def alive_everywhere(self, ranks: Sequence[Mapping[int, Any]]) -> Iterator[tuple[Replica, list[Any]]]:
        """The replicas that live on every rank, with what each rank says of them; a rank may collect one later."""
        for replica in self:
            if all(replica.number in rank for rank in ranks):
                yield replica, [rank[replica.number] for rank in ranks]

    def close(self) -> None:
        for replica in self:
            replica.leave()
