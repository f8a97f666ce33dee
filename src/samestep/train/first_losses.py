"""Looks at the first losses of a training, and says where they are not the serial script's.

Example: with cross_entropy(ignore_index=0) on 2 ranks, a mean over 7 terms of 4 samples and one over 3 terms of 4 are
averaged as if both had as many terms. The ranks' numbers of terms are compared with their next message.

Covered: the reduction against `replicate(loss=...)`, numbers of terms, constants that weigh the loss, samples that the
loss mixes, and tensors outside of all replicas. Not covered: losses after the first ones, except where an epoch begins.
"""

import math
from binascii import crc32
from collections.abc import Sequence
from itertools import chain, zip_longest
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from samestep.train.digest import bit_sums
from samestep.train.group.control import users_line
from samestep.train.group.group import Group
from samestep.train.loss import (
    Averaged,
    addends_of,
    kind_of,
    leaves_before,
    name_of,
    nodes_before,
    reduction_of,
    weights_in,
)
from samestep.train.passes import Share
from samestep.train.step import Spine

_FIRST_LOSSES = _FIRST_BATCHES = 3
_MOST_MEANS = 3
_NEAR_NODES = 50


class FirstLosses:
    """Looks at a loss where its backward begins; its remarks are printed on rank 0."""

    def __init__(self, group: Group) -> None:
        self._group, self._spine = group, group.the(Spine)
        # of the first batches: the leaves of the loss that belong to no replica
        self._unreplicated: dict[Share, list[torch.Tensor]] = {}
        self._losses_to_look_at = _FIRST_LOSSES if group.world.size > 1 else 0
        # the latest batches that were the first of all or of an epoch; for each the number of terms of each mean in its
        # latest loss, and that number for each sample
        self._terms: dict[Share, list[tuple[float, float]]] = {}
        group.watch(lambda: [*chain(*self._terms.values())], self._unlike_terms)
        # constants in the loss: how many the first loss has, its digest, and that of the latest loss with as many
        self._num_weights, self._weight_digests = -1, [0, 0]
        # whether batch/places.py followed a loss; not after a restart: the first start has printed the remarks
        self._is_followed = group.restarts > 0
        group.watch(lambda: self._weight_digests, self._unlike_weights)

    def whole(self, output: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """The loss that `backward(torch.ones_like(output))` means: the sum, as long as losses are looked at."""
        is_sum = output.numel() > 1 and self._losses_to_look_at and bool((gradient == 1).all())
        return output.sum() if is_sum else output

    def look_at(self, loss: torch.Tensor) -> None:
        """Collective in the second batch that trains a tensor of no replica. Print what is wrong with this loss."""
        if (share := self._spine.origins.at_hand) is None:
            return
        if len(self._unreplicated) <= _FIRST_BATCHES:
            self._compare_unreplicated(loss, share)
        averaged = self._spine.loss
        is_due = self._losses_to_look_at or (averaged and averaged.sums) or self._is_counted(share)
        if is_due and loss.numel() == 1:
            self._losses_to_look_at -= self._losses_to_look_at > 0
            with _disable_current_modes():
                self._check(loss)

    def _check(self, loss: torch.Tensor) -> None:
        """Print a remark where the reduction does not fit `replicate(loss=...)`; note the loss's terms and factors."""
        spine, found = self._spine, reduction_of(loss)
        share, averaged = spine.origins.trained, spine.loss or Averaged()
        reduction, count = kind_of(found, share)
        adds = spine.models.adds(leaves_before(loss))
        if reduction == "mean" and share is not None and not adds and self._is_counted(share):
            # ranks may have different numbers of microbatches, of which only the latest counts
            if share.microbatch is not None:
                self._terms.clear()
            elif share not in self._terms and len(self._terms) == _FIRST_LOSSES:
                del self._terms[next(iter(self._terms))]
            # (a + b) / 2 may be of two losses or of two samples
            first = math.nan if found["divisor"] == share.mine else count
            counts = [math.nan] if averaged.does else [first, *self._counts_of_addends(loss, share)]
            zeros = [0.0] * (_MOST_MEANS - len(counts))
            self._terms[share] = [self._terms_in(count or 0.0) for count in (*counts, *zeros)]
        if not adds:  # else a mean is multiplied by this rank's own number of terms
            weights = weights_in(loss, _NEAR_NODES)
            digest = crc32(repr(weights).encode())
            if self._num_weights < 0:
                self._num_weights, self._weight_digests[0] = len(weights), digest
            if self._num_weights == len(weights):
                self._weight_digests[1] = digest
        self._is_followed |= spine.loss is not None
        is_sum = averaged.sums and not averaged.does if self._is_followed else reduction == "sum"
        if is_sum and not adds and self._has_trained(loss):
            self._losses_to_look_at = 0
            self._group.say(
                f"the loss ({users_line()}) has a sum over samples, and the gradients of ranks are averaged: it trains "
                f"with 1/{self._group.world.size} of the serial script's gradient; write "
                'replicate(model, loss="sum"), or where the loss has means too, samestep.sum(...) around the sum',
                what="a sum",
            )
        if adds and averaged.means and not averaged.does:
            self._group.say(
                f"the loss ({users_line()}) has a mean over this rank's samples, and the gradients of ranks are added: "
                f"it trains with {self._group.world.size} times the serial script's gradient; leave "
                'loss="sum" out, or divide the sum of the terms by samestep.sum of their number',
                what="a mean",
            )

    def _counts_of_addends(self, loss: torch.Tensor, share: Share) -> list[float | None]:
        """The numbers of terms of a loss's means after its first; none if each may be the mean of a sample."""
        found = addends_of(loss, min(_MOST_MEANS, share.mine - 1))
        if len(found) > share.mine // 2 and any(reduced.get("rows") != share.mine for reduced in found):
            return []
        kinds = (kind_of(reduced, self._spine.origins.trained) for reduced in found[1:])
        return [count for reduction, count in kinds if reduction == "mean"]

    def _terms_in(self, count: float) -> tuple[float, float]:
        """A number of terms, and that number for each sample of a loader that is iterated now."""
        each = [count / batch.mine for batch in self._spine.origins.open_shares if batch.mine]
        return count, min([terms for terms in each if terms.is_integer()] or each)

    def _is_counted(self, share: Share | None) -> bool:
        """Whether the terms of losses in this batch are compared: all ranks have a share of it."""
        if share is None or share.lent or (share.all < self._group.world.size and share.microbatch is None):
            return False
        return share in self._terms or len(self._terms) < _FIRST_LOSSES or not share.batch_start

    def _has_trained(self, loss: torch.Tensor) -> bool:
        """Whether the loss trains parameters on this rank's samples, and not on samples that were gathered."""
        is_of_all = any(name_of(node) == "_MadeByAll" for node in nodes_before(loss.grad_fn, _NEAR_NODES))
        return not is_of_all and any(parameter.requires_grad for parameter in self._spine.models.parameters())

    def _unlike_weights(self, marks: list[Any], call: str) -> None:
        """Print that constants in the loss differ between ranks; a random constant differs from the first loss on."""
        if self._spine.weighed_by or len({first for first, _ in marks}) == 1:
            where = f" ({line})" if (line := self._spine.weighed_by) else ""
            self._group.say(
                f"the loss is weighed by a number of this rank's samples{where}, and ranks have unlike ones, so it is "
                "not the serial script's: write samestep.mean(...) around what the number is made of",
                what="unlike weights",
            )

    def _unlike_terms(self, marks: list[Any], call: str) -> None:
        """Print that ranks' numbers of terms are neither equal nor proportional to their shares of a batch."""
        of_means = [list(zip(*pairs, strict=True)) for pairs in zip_longest(*marks, fillvalue=(0.0, 0.0))]
        if any(_are_unlike(*pair, is_first=at % _MOST_MEANS == 0) for at, pair in enumerate(of_means)):
            self._group.say(
                "the loss has a mean over terms, and ranks have unlike numbers of them for each of their samples, as "
                "with ignore_index, class weights, a mask or padding; so it is not the mean of the whole batch: write "
                'replicate(model, loss="sum"), and divide the sum of the terms by samestep.sum of their number',
                what="unlike terms",
            )

    def _compare_unreplicated(self, loss: torch.Tensor, share: Share) -> None:
        """Collective where a second batch trains a leaf outside of all replicas: it has to be equal on all ranks."""
        if share.microbatch is not None or not 1 < self._group.world.size <= share.all:
            return
        latest = self._unreplicated.setdefault(share, [])
        if len(self._unreplicated) > _FIRST_BATCHES:
            for leaves in self._unreplicated.values():
                leaves.clear()
            return
        replicated = {id(parameter) for parameter in self._spine.models.parameters()}
        latest += [leaf for leaf in leaves_before(loss) if id(leaf) not in replicated]
        weights, size = self._spine.weights, self._group.world.size
        of_samples = {share.all // size, -(-share.all // size), share.all}
        for leaf in latest:
            if leaf.requires_grad and not weights.gives(leaf) and of_samples.isdisjoint(leaf.shape[:1]):
                weights.give_own(leaf)
        earlier = {
            id(leaf) for leaves in self._unreplicated.values() if leaves is not latest for leaf in leaves
        }
        again = [leaf for leaf in latest if id(leaf) in earlier]
        if not again:
            return
        digests = self._group.all_gather(f"samestep's check of backward ({users_line()})", bit_sums(again))
        if len(set(digests)) > 1:
            self._group.say(
                f"backward() ({users_line()}) trains a tensor of shape {list(again[0].shape)} that belongs to no "
                "replica, and it differs between ranks: each rank trains its own on its share; make it a parameter of "
                "a torch.nn.Module and replicate that",
                what="loose",
            )


def _are_unlike(terms: Sequence[float], each: Sequence[float], *, is_first: bool) -> bool:
    """Whether ranks' numbers of terms of a mean differ, and those for each sample too."""
    # a rank with few samples may count none but its loss's first mean
    is_counted = terms[0] if is_first else all(terms)
    alike = (max(counts) - min(counts) <= 1e-6 * max(counts) for counts in (terms, each))
    return bool(is_counted) and not any(map(math.isnan, terms)) and not any(alike)
