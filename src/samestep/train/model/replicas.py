"""All replicas of a group: what they do at passes and microbatches, and how their buffers are made equal."""

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from samestep.errors import UsageError
from samestep.train.backward import Backward, Hooks
from samestep.train.digest import bit_sums
from samestep.train.group.group import Group, Member
from samestep.train.model.batchnorm import Synced
from samestep.train.model.exchange import HeldHooks, times_of
from samestep.train.model.replica import Replica
from samestep.train.model.tree import Tree
from samestep.train.passes import Pass, Share
from samestep.train.step import Spine
from samestep.train.streams import draw_as, seed_of
from samestep.train.subscriber import Models

_DIGITS = 16


class Replicas(Member, Models):
    """The replicas in the order in which they were made, which is the same on every rank."""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        # models in a world of one: they are left as they are, until `steps` needs their microbatches weighed
        self.alone: weakref.WeakKeyDictionary[torch.nn.Module, bool] = weakref.WeakKeyDictionary()
        self.asked: weakref.WeakKeyDictionary[torch.nn.Module, object] = (
            weakref.WeakKeyDictionary()
        )  # with options
        self._references: list[weakref.ref[Replica]] = []
        self._num_made = 0
        self._any_moves_buffers = False
        self._own_seed: int | None = None  # the seed of this rank's own random stream
        self._is_to_part = False
        self._spine = group.the(Spine)
        group.the(Backward)
        group.the(Hooks)
        self._spine.subscribe(self)
        self._spine.models = self

    def __iter__(self) -> Iterator[Replica]:
        return (replica for reference in tuple(self._references) if (replica := reference()) is not None)

    @property
    def exact(self) -> bool:
        """Whether a replica adds its gradients in the fixed tree."""
        return any(replica.tree for replica in self)

    def add(
        self, model: torch.nn.Module, options: dict[str, Any], *, sums: bool, tree: Tree | None = None
    ) -> None:
        """Collective. Make this model a replica."""
        replica = Replica(self._num_made, model, options, self.group, sums=sums, tree=tree)
        self._num_made += 1
        self._any_moves_buffers |= replica.moves_buffers
        self._references.append(weakref.ref(replica, self._references.remove))
        for parameter in model.parameters():
            self._spine.weights.give_replicas(parameter)

    def draw_apart(self) -> None:
        """From the next batch or call of a replica on, let each rank draw its own numbers."""
        self._is_to_part = self.group.world.rank > 0

    @property
    def kernels(self) -> list[Any]:
        """On what it depends which kernels of BatchNorm take the next steps; other kernels round otherwise."""
        return [self._spine.derives_twice, [norm.early_calls for norm in self._norms()]]

    def _norms(self) -> Iterator[Synced]:
        return (norm for replica in self for norm in replica.model.modules() if isinstance(norm, Synced))

    def go_on(self, *, is_apart: bool, kernels: list[Any] | None) -> None:
        """A resume has set this rank's stream; whether the stream was its own when it was kept."""
        self._spine.derives_twice, early_calls = kernels or self.kernels
        for norm, calls in zip(self._norms(), early_calls, strict=False):
            norm.early_calls = calls
        self._is_to_part = not is_apart and self._num_made > 0 and self.group.world.rank > 0
        self._own_seed = torch.initial_seed() if is_apart else None

    def part(self) -> None:
        """Give each rank but 0 its own random stream: ranks with equal seeds would drop out the same units."""
        if self._is_to_part and torch.initial_seed() != self._own_seed:
            self._own_seed = seed_of("rank", torch.initial_seed(), self.group.world.rank)
            torch.manual_seed(self._own_seed)
        self._is_to_part = False

    def trains(self, shuffled: bool) -> bool:
        return any(shuffled or replica.model.training for replica in self)

    def parameters(self) -> Iterator[torch.Tensor]:
        return (parameter for replica in self for parameter in replica.model.parameters())

    def name_of(self, parameter: torch.Tensor) -> str:
        for model in (replica.model for replica in self):
            for name, named in model.named_parameters():
                if named is parameter:
                    return f"{name} of {type(model).__name__}"
        return ""

    def exchanges(self) -> Iterator[tuple[float, float]]:
        for replica in self:
            if replica.ddp is not None:
                yield times_of(replica.ddp)
            elif replica.tree is not None:
                yield replica.tree.exchange_s, 0.0

    def adds(self, leaves: Iterable[torch.Tensor] = ()) -> bool:
        if not any(replica.sums for replica in self):
            return False
        ids = {id(leaf) for leaf in leaves}
        owners = [owner for owner in self if ids and not ids.isdisjoint(map(id, owner.model.parameters()))]
        return any(replica.sums for replica in owners or self)

    def holds_back(self, parameters: Iterable[torch.Tensor]) -> bool:
        holding = [replica for replica in self if replica.holds_back]
        ids = {id(parameter) for parameter in parameters if parameter.grad is not None} if holding else ()
        return any(id(parameter) in ids for replica in holding for parameter in replica.model.parameters())

    def holds(self, module: torch.nn.Module) -> bool:
        return any(
            part is module is not replica.model for replica in self for part in replica.model.modules()
        )

    @property
    def weighs_losses(self) -> bool:
        trees = [replica.tree for replica in self]
        return bool(trees) and not any(trees)

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Call the script's hooks on parameters after the exchange, so that they get the whole batch's gradient."""
        arrived: list[HeldHooks] = []  # in the order in which the serial script calls them
        held_hooks = [
            HeldHooks(weight, replica.own_hooks, arrived) for replica in self for weight in replica.hooked
        ]
        try:
            yield
            for replica in self:
                replica.finish_exchange()
        finally:
            for hooks in held_hooks:
                hooks.put_back()
        for hooks in dict.fromkeys(arrived):  # a checkpointed segment gives a gradient in pieces
            hooks.run()

    def pass_begins(self, begun: Pass) -> None:
        self.part()
        if not begun.training:
            return
        for replica in self:
            if replica.has_trained and (replaced := replica.replaced()):
                ranks = self.group.all_gather("samestep.replicate's parameters", sums_of(replaced.values()))
                if differing := first_unlike(replaced, ranks):
                    self.group.say(
                        f"the parameter {differing[0]} of {type(replica.model).__name__} was replaced by one that each "
                        "rank computed of its own share, or drew, and only rank 0's is kept; take samestep.mean(...) "
                        "of what it is computed from",
                        what="a parameter",
                    )
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
        gc.collect()  # a model and its replica refer to each other, so a deleted model may still be in memory
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
        """Collective in a step's last microbatch. A tree that no rank used in the step has nothing to exchange."""
        if not share.of.training or not (trees := self._trees()):
            return
        for tree in trees.values():
            tree.microbatch_ends(share)
        if share.last:
            mine = {number: tree.used for number, tree in trees.items() if tree.used}
            used = self.group.all_gather("samestep.replicate's gradients", mine)
            for number, tree in trees.items():
                tree.step_ends(share, [flags[str(number)] for flags in used if str(number) in flags])
            draw_as(share.of.seed, share.of.epoch, share.batch_start, "after")

    def _trees(self) -> dict[int, Tree]:
        return {replica.number: replica.tree for replica in self if replica.tree is not None}

    def pass_ends(self, ended: Pass) -> None:
        if ended.training:
            self.settle()

    def settle(self) -> None:
        """Collective. Copy rank 0's buffers to all ranks, where training has changed them."""
        if not self._any_moves_buffers:
            return

        def own_sums(replica: Replica) -> str | None:
            return sums_of(replica.own_buffers().values()) if replica.dirty else None

        for replica, ranks in self.compared("samestep.replicate's buffers", own_sums):
            if dirty := [sums for sums in ranks if sums is not None]:
                if differing := first_unlike(replica.own_buffers(), dirty):
                    name = f"{differing[0]} of {type(replica.model).__name__}"  # not a BatchNorm's
                    self.group.say(
                        f"forward computes the buffer {name} from each rank's own share, and only rank 0's value is "
                        "kept; take samestep.mean(...) of a mean, or samestep.gather(...) of rows, from which it is "
                        "computed, or use replicate(exact=True) with steps",
                        what="a buffer",
                    )
                replica.share_buffers()

    def compared(
        self, call: str, fact: Callable[[Replica], str | None]
    ) -> Iterator[tuple[Replica, list[Any]]]:
        """Collective. The replicas that are alive on every rank, each with the fact of every rank."""
        ranks = self.group.all_gather(call, {replica.number: fact(replica) for replica in self})
        for replica in self:
            number = str(replica.number)
            if all(number in facts for facts in ranks):
                yield replica, [facts[number] for facts in ranks]

    def close(self) -> None:
        for replica in self:
            replica.leave()


def sums_of(tensors: Iterable[torch.Tensor]) -> str:
    """16 hexadecimal digits for each tensor, which any change of a bit changes."""
    return bit_sums(tensors).hex()


def first_unlike(names: Iterable[str], ranks: Sequence[Any]) -> tuple[str, list[str]] | None:
    """The name of the first tensor whose digits differ between ranks, and its digits on each rank."""
    for index, name in enumerate(names):
        column = [sums[_DIGITS * index : _DIGITS * (index + 1)] for sums in ranks]
        if len(set(column)) > 1:
            return name, column
    return None
