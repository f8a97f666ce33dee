"""All replicas of a group: what they do together at passes, and which of their buffers have to be made equal."""

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from samestep.errors import UsageError
from samestep.train.backward import Backward
from samestep.train.digest import bit_sums
from samestep.train.group.group import Group, Member
from samestep.train.hooks import Hooks
from samestep.train.model.exchange import HeldHooks, times_of
from samestep.train.model.replica import Replica
from samestep.train.model.tree import Tree
from samestep.train.step import Pass, Share, Spine
from samestep.train.streams import draw_as, seed_of
from samestep.train.subscriber import Models

_DIGITS = 16


class Replicas(Member, Models):
    """All replicas of a group, in the order they were made, which is the same on every rank."""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        # in a world of one a model is left as it is, until its microbatches have to be weighed
        self.alone: weakref.WeakKeyDictionary[torch.nn.Module, bool] = weakref.WeakKeyDictionary()
        self._living: list[weakref.ref[Replica]] = []
        self._made = 0
        self._any_moves_buffers = False
        self._apart: int | None = None  # the seed by which this rank's stream is its own
        spine = group.the(Spine)
        group.the(Backward)
        group.the(Hooks)
        spine.subscribe(self)
        spine.models = self

    def __iter__(self) -> Iterator[Replica]:
        return (replica for held in tuple(self._living) if (replica := held()) is not None)

    @property
    def exact(self) -> bool:
        """Whether gradients are added in the fixed tree."""
        return any(replica.tree for replica in self)

    def add(
        self, model: torch.nn.Module, options: dict[str, Any], *, sums: bool, tree: Tree | None = None
    ) -> None:
        """Collective. Make this model a replica."""
        replica = Replica(self._made, model, options, self.group, sums=sums, tree=tree)
        self._made += 1
        self._any_moves_buffers |= replica.moves_buffers
        self._living.append(weakref.ref(replica, self._living.remove))

    def draw_apart(self) -> None:
        """Ranks seeded alike would drop out the same units; rank 0 keeps the serial script's stream."""
        rank = self.group.world.rank
        if rank and torch.initial_seed() != self._apart:
            self._apart = seed_of("rank", torch.initial_seed(), rank)
            torch.manual_seed(self._apart)

    def trains(self, shuffled: bool) -> bool:
        return any(shuffled or replica.model.training for replica in self)

    def parameters(self) -> Iterator[torch.Tensor]:
        return (parameter for replica in self for parameter in replica.model.parameters())

    def exchanges(self) -> Iterator[tuple[float, float]]:
        for replica in self:
            if replica.ddp is not None:
                yield times_of(replica.ddp)
            elif replica.tree is not None:
                yield replica.tree.exchange_s, 0.0

    def adds(self, leaves: Iterable[torch.Tensor] = ()) -> bool:
        if not any(replica.sums for replica in self):
            return False
        found = {id(leaf) for leaf in leaves}
        of = [one for one in self if found and not found.isdisjoint(map(id, one.model.parameters()))]
        return any(replica.sums for replica in of or self)

    @property
    def weigh_losses(self) -> bool:
        trees = [replica.tree for replica in self]
        return bool(trees) and not any(trees)

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """The script's hooks on parameters come after the exchange: they get the whole batch's gradient."""
        held = [HeldHooks(one, replica.own_hooks) for replica in self for one in replica.hooked]
        try:
            yield
            for replica in self:
                replica.finish_exchange()
        finally:
            for hooks in held:
                hooks.put_back()
        for hooks in held:
            hooks.run()

    def pass_begins(self, begun: Pass) -> None:
        if not begun.training:
            return
        for replica in self:
            replica.follow_parameters()
        if not begun.microbatches:
            return
        for model, sums in list(self.alone.items()):
            del self.alone[model]
            self.add(model, {}, sums=sums)
        size = self.group.world.size
        uneven = next((count for count in begun.microbatches if count % size), None)
        if uneven is None or not any(replica.has_synced_statistics for replica in self):
            return
        gc.collect()  # a model and its replica hold each other, also when the script has left them
        if any(replica.has_synced_statistics for replica in self):
            raise UsageError(
                f"a step of {uneven} microbatches gives the {size} ranks unequal numbers of them, and a BatchNorm "
                "over all ranks needs equal ones; choose a batch_size and a microbatch whose numbers divide evenly, "
                "with drop_last=True, or leave sync_batchnorm out"
            )

    def microbatch_begins(self, share: Share) -> None:
        if share.of.training and (trees := self._trees()):
            for tree in trees.values():
                tree.microbatch_begins(share)
            draw_as(share.of.seed, share.of.epoch, share.batch_start, share.microbatch or 0)

    def microbatch_ends(self, share: Share) -> None:
        """Collective in the last one of a step. A tree that no rank used in it has nothing to exchange."""
        if not share.of.training or not (trees := self._trees()):
            return
        for tree in trees.values():
            tree.microbatch_ends(share)
        if share.last:
            mine = {number: tree.used for number, tree in trees.items() if tree.used}
            used = self.group.all_gather("samestep.replicate's gradients", mine)
            for number, tree in trees.items():
                tree.step_ends(share, [said[str(number)] for said in used if str(number) in said])
            draw_as(share.of.seed, share.of.epoch, share.batch_start, "after")

    def _trees(self) -> dict[int, Tree]:
        return {replica.number: replica.tree for replica in self if replica.tree is not None}

    def pass_ends(self, ended: Pass) -> None:
        if ended.training:
            self.settle()

    def settle(self) -> None:
        """Collective. Make rank 0's buffers everyone's, where training has moved them apart."""
        if not self._any_moves_buffers:
            return

        def own_sums(replica: Replica) -> str | None:
            return sums_of(replica.own_buffers().values()) if replica.dirty else None

        for replica, ranks in self.compared("samestep.replicate's buffers", own_sums):
            if dirty := [sums for sums in ranks if sums is not None]:
                if found := first_unlike(replica.own_buffers(), dirty):
                    self._say_own_buffer(f"{found[0]} of {type(replica.model).__name__}")
                replica.share_buffers()

    def _say_own_buffer(self, name: str) -> None:
        """Name a buffer, other than BatchNorm's, that training changes from each rank's share alone."""
        self.group.say(
            f"forward computes the buffer {name} from each rank's own share, and only rank 0's value is kept; take "
            "samestep.mean(...) of what it is computed from, or use replicate(exact=True) with steps",
            what="a buffer",
        )

    def compared(
        self, call: str, fact: Callable[[Replica], str | None]
    ) -> Iterator[tuple[Replica, list[Any]]]:
        """Collective. The replicas that live on every rank, with what each rank says of them."""
        ranks = self.group.all_gather(call, {replica.number: fact(replica) for replica in self})
        for replica in self:
            number = str(replica.number)
            if all(number in said for said in ranks):
                yield replica, [said[number] for said in ranks]

    def close(self) -> None:
        for replica in self:
            replica.leave()


def sums_of(tensors: Iterable[torch.Tensor]) -> str:
    """16 digits for each tensor, which another value changes."""
    return bit_sums(tensors).hex()


def first_unlike(names: Iterable[str], ranks: Sequence[Any]) -> tuple[str, list[str]] | None:
    """The first tensor whose digits are not the same on all ranks, by its name, with those of each rank."""
    for at, name in enumerate(names):
        column = [sums[_DIGITS * at : _DIGITS * (at + 1)] for sums in ranks]
        if len(set(column)) > 1:
            return name, column
    return None
