"""Weighs a rank's loss by its share where backward begins, so that averaged gradients are the whole batch's.

Example: of a batch of 5 samples rank 0 of 2 has 3, and DDP averages over ranks. Rank 0's mean loss is multiplied by
3 * 2 / 5 and rank 1's by 2 * 2 / 5: the average of both gradients is that of the mean over all 5 samples.

Covered: `backward()` and `torch.autograd.grad`, whether the loss was computed by the model, by its parts or from its
weights alone. Not covered: gradients under `torch.func`, and one backward through batches with different shares. In
that only the calls of a replica are weighed.
"""

import math
import struct
import sys
from binascii import crc32
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from samestep.text import name_ranks
from samestep.train.digest import bit_sums
from samestep.train.group.control import users_line
from samestep.train.group.group import Group, Member
from samestep.train.loss import (
    Averaged,
    addends_of,
    leaves_before,
    name_of,
    nodes_before,
    reduction_of,
    weights_in,
)
from samestep.train.passes import Share
from samestep.train.script.lines import scripts_frame
from samestep.train.script.sizes import is_over_samples
from samestep.train.step import Spine, spine
from samestep.train.subscriber import Subscriber

_FIRST_LOSSES = _FIRST_BATCHES = 3
# backward() and grad() both look up _engine_run_backward here; torch 2.13 has no public hook for both
_AUTOGRAD: Any = torch.autograd
_ELEMENTWISE = ("Add", "Sub", "Mul", "Div", "Neg", "Clone", "Sqrt", "Rsqrt", "Pow", "Lerp", "ToCopy")
_MANY_LOSSES = 4
_MOST_MEANS = 3
_TERMS = struct.Struct(f"<{2 * _MOST_MEANS * _FIRST_LOSSES}f")
_MOST_NODES = 1000
_NEAR_NODES = 50
_REAL = (torch.Tensor, torch.nn.Parameter)


class SumOverRanks(torch.autograd.Function):
    """Sum over ranks; its gradient is summed too, since every rank's loss depends on the sum."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, call: str) -> torch.Tensor:
        ctx.call = call
        total = part.clone(memory_format=torch.contiguous_format)
        with spine().group.waiting(call):
            dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return SumOverRanks.apply(gradient, ctx.call), None  # type: ignore[no-untyped-call]


class Backward(Member):
    """Replaces the function through which torch enters its autograd engine."""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self._spine = group.the(Spine)
        self._is_running = False
        # of the first batches: the leaves of the loss that belong to no replica
        self._unreplicated: dict[Share, list[torch.Tensor]] = {}
        self._losses_to_look_at = _FIRST_LOSSES if group.world.size > 1 else 0
        # the latest batches that were the first of all or of an epoch; for each the number of terms of each mean in its
        # latest loss, and that number for each sample
        self._terms: dict[Share, list[tuple[float, float]]] = {}
        group.watch(self._mark_of_terms, self._unlike_terms)
        # constants in the loss: how many the first loss has, its digest, and that of the latest loss with as many
        self._num_weights, self._weight_digests = -1, bytes(8)
        # whether batch/places.py followed a loss; not after a restart: the first start has printed the remarks
        self._is_followed = group.restarts > 0
        group.watch(lambda: self._weight_digests, self._unlike_weights)
        self._original: Callable[..., Any] = _AUTOGRAD._engine_run_backward
        self._replacement = self._replaced_run()
        _AUTOGRAD._engine_run_backward = self._replacement

    def close(self) -> None:
        if _AUTOGRAD._engine_run_backward is self._replacement:
            _AUTOGRAD._engine_run_backward = self._original

    def _replaced_run(self) -> Callable[..., Any]:
        original = self._original

        def run(outputs: Sequence[Any], gradients: Sequence[Any], *args: Any, **options: Any) -> Any:
            # a checkpointed segment runs backward inside of backward, torch.compile runs the engine on fake tensors
            if self._is_running or type(outputs[0]) not in _REAL or is_functional():
                return original(outputs, gradients, *args, **options)
            self._is_running = True
            way = self._run_backward if options["accumulate_grad"] else self._run_grad
            try:
                return way(original, outputs, gradients, *args, **options)
            finally:
                self._is_running = False
                self._spine.weights.of_loss = self._spine.weights.of_leaves = 1.0

        return run

    def _run_backward(
        self, original: Any, outputs: Sequence[Any], gradients: Sequence[Any], *args: Any, **options: Any
    ) -> Any:
        spine, loss = self._spine, outputs[0]
        if loss.numel() > 1 and self._losses_to_look_at and bool((gradients[0] == 1).all()):
            loss = loss.sum()
        spine.tell(Subscriber.backward_begins, loss)
        share = spine.origins.at_hand
        if share is not None and len(self._unreplicated) <= _FIRST_BATCHES:
            self._compare_unreplicated(outputs[0], share)
        is_due = self._losses_to_look_at or (spine.loss and spine.loss.sums) or self._is_counted(share)
        if is_due and share is not None and loss.numel() == 1:
            self._losses_to_look_at -= self._losses_to_look_at > 0
            with _disable_current_modes():
                self._check_loss(loss)
        spine.weights.of_loss = spine.weights.of_next_loss(spine.models)
        spine.weights.of_leaves = self._weight_for_inputs(outputs) if spine.weights.needs_leaves else 1.0
        spine.weights.of_calls.clear()
        with self.group.within("backward"), spine.models.exchanging():
            return original(outputs, _times(gradients, spine.weights.of_loss), *args, **options)

    def _run_grad(
        self,
        original: Any,
        outputs: Sequence[Any],
        gradients: Sequence[Any],
        retain_graph: bool,
        create_graph: bool,
        inputs: Sequence[Any],
        *args: Any,
        **options: Any,
    ) -> Any:
        """Collective for gradients of equal tensors with create_graph, but not in a loop over samples (as MAML's)."""
        spine, size = self._spine, self.group.world.size
        share = spine.origins.trained
        is_of_sample = size > 1 and share is not None and _is_over_samples(share)
        is_in_forward = self.group.phase[0] == "forward"
        weights = spine.models.parameters() if is_in_forward or is_of_sample else ()
        are_weights = {weight.shape for weight in weights}.issuperset(tensor.shape for tensor in inputs)
        if is_in_forward and are_weights:
            # gradients of weights inside of forward are of some samples only, as of each task of MAML
            mine = share.mine if create_graph and share and 1 < share.mine < share.all else 0
            terms = self._reduction_of(outputs[0])[1] if mine and outputs[0].numel() == 1 else None
            if mine and not (terms and terms % mine):
                self.group.say(
                    f"torch.autograd.grad ({users_line()}) derives weights inside a model's forward, of this rank's "
                    "samples alone; if all samples of the batch are meant, call it outside of forward",
                    what="slopes in forward",
                )
            return original(outputs, gradients, retain_graph, create_graph, inputs, *args, **options)
        # ranks may have different numbers of microbatches, so no collective is possible in a microbatch
        is_whole = not is_of_sample and (share is None or share.microbatch is None)
        is_shared = size > 1 and spine.models.weighs_losses and is_whole
        parameters = {id(tensor) for tensor in spine.models.parameters()} if is_shared else set()
        are_equal = [_is_equal_on_ranks(tensor, parameters) for tensor in inputs]
        spine.weights.of_loss = spine.weights.of_leaves = spine.weights.of_next_loss(spine.models)
        if is_of_sample:
            weight = self._weight_for_parameters(create_graph=False) if are_weights else 1.0
        elif any(are_equal):
            weight = self._weight_for_parameters(create_graph=create_graph)
        else:
            weight = self._weight_for_inputs(outputs)
        weighed = _times(gradients, weight)
        slopes = original(outputs, weighed, retain_graph, create_graph, inputs, *args, **options)
        if not retain_graph:
            spine.weights.of_calls.clear()
        if not create_graph or not any(are_equal):
            if is_shared and outputs[0].numel() == 1:
                # gradients of inputs are divided by the whole batch's size, so ranks' gradients are terms of a sum
                spine.tell(Subscriber.slopes_given, (inputs, slopes, not any(are_equal)))
            return slopes
        call = f"torch.autograd.grad ({users_line()})"
        return tuple(
            SumOverRanks.apply(slope, call) / size if is_equal and slope is not None else slope  # type: ignore[no-untyped-call]
            for slope, is_equal in zip(slopes, are_equal, strict=True)
        )

    def _weight_for_parameters(self, *, create_graph: bool) -> float:
        """The factor of a loss where `grad` is asked for gradients of parameters."""
        if create_graph:
            return self._spine.weights.of_loss
        return 1 / self.group.world.size if self._spine.models.adds() else 1.0

    def _reduction_of(self, loss: torch.Tensor) -> tuple[str | None, float | None]:
        """The kind of a loss, "mean", "sum" or None, and a mean's number of terms.

        A sum divided by the whole batch's size is a sum. So is a sum of as many mean losses as this rank has samples;
        divided by that number it is a mean.
        """
        return self._kind_of(reduction_of(loss))

    def _kind_of(self, found: dict[str, Any]) -> tuple[str | None, float | None]:
        share = self._spine.origins.trained
        count, mine = found.get("terms"), share.mine if share is not None else 0
        if found["reduction"] == "mean":
            is_sum = found["losses"] >= mine >= _MANY_LOSSES and found["divisor"] is None
            return ("sum", None) if is_sum else ("mean", mine if found["divisor"] == mine else count)
        if count is None:
            return found["reduction"], None
        is_sum = share is not None and share.mine < share.all == count
        return ("sum", None) if is_sum else ("mean", count)

    def _weight_for_inputs(self, outputs: Sequence[torch.Tensor]) -> float:
        """The factor of a loss for gradients of its inputs: those of a mean are divided by the whole batch's size."""
        spine = self._spine
        is_mean = outputs[0].numel() == 1 and self._reduction_of(outputs[0])[0] == "mean"
        if (
            is_mean
            and not spine.models.adds()
            and (share := spine.origins.trained)
            and share.microbatch is None
        ):
            return spine.weights.of_loss / float(self.group.world.size)
        return 1.0 if spine.weights.of_loss else 0.0

    def _check_loss(self, loss: torch.Tensor) -> None:
        """Print a remark where the reduction does not fit `replicate(loss=...)`; note the loss's terms and factors."""
        spine, found = self._spine, reduction_of(loss)
        reduction, count = self._kind_of(found)
        share, averaged = spine.origins.trained, spine.loss or Averaged()
        adds = spine.models.adds(leaves_before(loss))
        if reduction == "mean" and share is not None and not adds and self._is_counted(share):
            # ranks may have different numbers of microbatches, of which only the latest counts
            if share.microbatch is not None:
                self._terms.clear()
            elif share not in self._terms and len(self._terms) == _FIRST_LOSSES:
                del self._terms[next(iter(self._terms))]
            # (a + b) / 2 may be of two losses or of two samples
            first = math.nan if found["divisor"] == share.mine else count
            counts = [-1.0] if averaged.does else [first, *self._counts_of_addends(loss, share)]
            zeros = [0.0] * (_MOST_MEANS - len(counts))
            self._terms[share] = [self._terms_in(count or 0.0) for count in (*counts, *zeros)]
        if not adds:  # else a mean is multiplied by this rank's own number of terms
            weights = weights_in(loss, _NEAR_NODES)
            digest = crc32(repr(weights).encode()).to_bytes(4)
            if self._num_weights < 0:
                self._num_weights, self._weight_digests = len(weights), digest * 2
            if self._num_weights == len(weights):
                self._weight_digests = self._weight_digests[:4] + digest
        self._is_followed |= spine.loss is not None
        is_sum = averaged.sums and not averaged.does if self._is_followed else reduction == "sum"
        if is_sum and not adds and self._has_trained(loss):
            self._losses_to_look_at = 0
            self.group.say(
                f"the loss ({users_line()}) has a sum over samples, and the gradients of ranks are averaged: it trains "
                f"with 1/{self.group.world.size} of the serial script's gradient; write "
                'replicate(model, loss="sum"), or where the loss has means too, samestep.sum(...) around the sum',
                what="a sum",
            )
        if adds and averaged.means and not averaged.does:
            self.group.say(
                f"the loss ({users_line()}) has a mean over this rank's samples, and the gradients of ranks are added: "
                f"it trains with {self.group.world.size} times the serial script's gradient; leave "
                'loss="sum" out, or divide the sum of the terms by samestep.sum of their number',
                what="a mean",
            )

    def _counts_of_addends(self, loss: torch.Tensor, share: Share) -> list[float | None]:
        """The numbers of terms of a loss's means after its first; none if each may be the mean of a sample."""
        found = addends_of(loss, min(_MOST_MEANS, share.mine // 2))
        return [count for reduction, count in map(self._kind_of, found[1:]) if reduction == "mean"]

    def _terms_in(self, count: float) -> tuple[float, float]:
        """A number of terms, and that number for each sample of a loader that is iterated now."""
        each = [count / batch.mine for batch in self._spine.origins.open_shares if batch.mine]
        return count, min([terms for terms in each if terms.is_integer()] or each)

    def _is_counted(self, share: Share | None) -> bool:
        """Whether the terms of losses in this batch are compared: all ranks have a share of it."""
        if share is None or share.lent or (share.all < self.group.world.size and share.microbatch is None):
            return False
        return share in self._terms or len(self._terms) < _FIRST_LOSSES or not share.batch_start

    def _mark_of_terms(self) -> bytes:
        numbers = [number for terms in self._terms.values() for both in terms for number in both]
        return _TERMS.pack(*numbers, *[0.0] * (2 * _MOST_MEANS * _FIRST_LOSSES - len(numbers)))

    def _has_trained(self, loss: torch.Tensor) -> bool:
        """Whether the loss trains parameters on this rank's samples, and not on samples that were gathered."""
        is_of_all = any(name_of(node) == "_MadeByAll" for node in nodes_before(loss.grad_fn, _NEAR_NODES))
        return not is_of_all and any(parameter.requires_grad for parameter in self._spine.models.parameters())

    def _unlike_weights(self, marks: list[bytes], call: str) -> None:
        """Print that constants in the loss differ between ranks; a random constant differs from the first loss on."""
        if self._spine.weighed_by or len({mark[:4] for mark in marks}) == 1:
            where = f" ({line})" if (line := self._spine.weighed_by) else ""
            self.group.say(
                f"the loss is weighed by a number of this rank's samples{where}, and ranks have unlike ones, so it is "
                "not the serial script's: write samestep.mean(...) around what the number is made of",
                what="unlike weights",
            )

    def _unlike_terms(self, marks: list[bytes], call: str) -> None:
        """Print that ranks' numbers of terms are neither equal nor proportional to their shares of a batch."""
        numbers = list(zip(*map(_TERMS.unpack, marks), strict=True))
        of_means = list(zip(numbers[::2], numbers[1::2], strict=True))
        mixing = {rank for terms, _ in of_means for rank, count in enumerate(terms) if count < 0}
        if mixing and 0 not in mixing:  # else rank 0 has printed a remark with the line
            self.group.say(
                f"the loss mixes the samples of a batch on {name_ranks(mixing)}, as where these are sorted, so it is "
                "not the serial script's: first join the batch with samestep.gather(...)",
                what="mixed samples",
            )
        if any(_are_unlike(*pair, is_first=at % _MOST_MEANS == 0) for at, pair in enumerate(of_means)):
            self.group.say(
                "the loss has a mean over terms, and ranks have unlike numbers of them for each of their samples, as "
                "with ignore_index, class weights, a mask or padding; so it is not the mean of the whole batch: write "
                'replicate(model, loss="sum"), and divide the sum of the terms by samestep.sum of their number',
                what="unlike terms",
            )

    def _compare_unreplicated(self, loss: torch.Tensor, share: Share) -> None:
        """Collective where a second batch trains a leaf outside of all replicas: it has to be equal on all ranks."""
        if share.microbatch is not None or not 1 < self.group.world.size <= share.all:
            return
        latest = self._unreplicated.setdefault(share, [])
        if len(self._unreplicated) > _FIRST_BATCHES:
            for leaves in self._unreplicated.values():
                leaves.clear()
            return
        replicated = {id(parameter) for parameter in self._spine.models.parameters()}
        latest += [leaf for leaf in leaves_before(loss) if id(leaf) not in replicated]
        earlier = {
            id(leaf) for leaves in self._unreplicated.values() if leaves is not latest for leaf in leaves
        }
        again = [leaf for leaf in latest if id(leaf) in earlier]
        if not again:
            return
        digests = self.group.all_gather(f"samestep's check of backward ({users_line()})", bit_sums(again))
        if len(set(digests)) > 1:
            self.group.say(
                f"backward() ({users_line()}) trains a tensor of shape {list(again[0].shape)} that belongs to no "
                "replica, and it differs between ranks: each rank trains its own on its share; make it a parameter of "
                "a torch.nn.Module and replicate that",
                what="loose",
            )


def _are_unlike(terms: Sequence[float], each: Sequence[float], *, is_first: bool) -> bool:
    """Whether ranks' numbers of terms of a mean differ, and those for each sample too."""
    # a rank with few samples may count none but its loss's first mean
    is_counted = min(terms) >= 0 and (terms[0] if is_first else all(terms))
    alike = (max(counts) - min(counts) <= 1e-6 * max(counts) for counts in (terms, each))
    return bool(is_counted) and not any(map(math.isnan, terms)) and not any(alike)


def _times(gradients: Sequence[Any], factor: float) -> tuple[Any, ...]:
    return tuple(grad if grad is None or factor == 1.0 else grad * factor for grad in gradients)


def is_functional() -> bool:
    """Whether torch.func or a batched gradient is running; what they compute is not weighed."""
    return torch._C._functorch.maybe_current_level() is not None


def _is_over_samples(share: Share) -> bool:
    """Whether the script is in a loop over this rank's samples."""
    return is_over_samples(scripts_frame(sys._getframe(1)), share.mine or share.all)


def _is_equal_on_ranks(tensor: Any, parameters: set[int]) -> bool:
    """Whether a tensor is equal on all ranks: a parameter, a step from one (MAML's fast weights), a scalar (IRM's)."""
    if not isinstance(tensor, torch.Tensor) or not parameters or tensor.grad_fn is None:
        is_single = not tensor.dim() or (isinstance(tensor, torch.nn.Parameter) and tensor.numel() == 1)
        return id(tensor) in parameters or (bool(parameters) and is_single and not tensor._is_view())

    def is_elementwise(node: Any) -> bool:
        return name_of(node).startswith(_ELEMENTWISE)

    def is_of_all(node: Any) -> bool:
        variable = getattr(node, "variable", None)
        if variable is None:
            return is_elementwise(node) or name_of(node) == SumOverRanks.__name__
        return id(variable) in parameters and variable.shape == tensor.shape

    nodes = list(nodes_before(tensor.grad_fn, _MOST_NODES + 1, is_elementwise))
    return len(nodes) <= _MOST_NODES and all(map(is_of_all, nodes))
