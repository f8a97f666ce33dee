"""Where backward begins: a rank's loss counts there by its share, so that gradients add up to the whole batch's.

Covered: `backward()` and `torch.autograd.grad`, on whatever way the loss comes from the parameters: through the model,
through its parts, as a penalty on weights. Not covered: gradients under `torch.func`, and several batches of unlike
shares in one backward: there only what came through `model(...)` counts by its share.
"""

import struct
import sys
from binascii import crc32
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from samestep.train.digest import bit_sums
from samestep.train.draw_lines import scripts_frame
from samestep.train.draw_sizes import is_over_samples
from samestep.train.group.control import users_line
from samestep.train.group.group import Group, Member
from samestep.train.loss import Averaged, leaves_before, name_of, nodes_before, reduction_of, weights_in
from samestep.train.step import Share, Spine, cut, spine
from samestep.train.subscriber import Subscriber

_FIRST_LOSSES = _FIRST_BATCHES = 3
# both ways into the engine, backward() and grad(), look this up; nothing public of torch 2.13 is in both
_AUTOGRAD: Any = torch.autograd
_TERMS = struct.Struct("<d")
_ELEMENTWISE = ("Add", "Sub", "Mul", "Div", "Neg", "Clone", "Sqrt", "Rsqrt", "Pow", "Lerp", "ToCopy")
_MANY_LOSSES = 4
_MOST_NODES = 1000
_NEAR_NODES = 50
_REAL = (torch.Tensor, torch.nn.Parameter)


class SumOverRanks(torch.autograd.Function):
    """Every rank's loss depends on the sum, so its gradient is the sum over ranks too."""

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
    """Stands in torch's one way into its autograd engine."""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self._spine = group.the(Spine)
        self._is_running = False
        # of the first batches, the leaves that no replica holds
        self._loose: dict[Share, list[torch.Tensor]] = {}
        self._losses_to_look_at = _FIRST_LOSSES if group.world.size > 1 else 0
        # of the latest loss that was looked at: its terms, and the samples of each batch that it may be of
        self._terms, self._rows = 0.0, set[int]()
        group.watch(lambda: _TERMS.pack(self._terms), self._unlike_terms)
        # how many numbers weigh the first loss, and digests of them and of those of the latest loss with as many
        self._count_of_weights, self._weights = -1, bytes(8)
        # after a restart nothing is followed, and what there is to say was said
        self._is_followed = group.restarts > 0
        group.watch(lambda: self._weights, self._unlike_weights)
        self._run: Callable[..., Any] = _AUTOGRAD._engine_run_backward
        self._watched = self._watched_run()
        _AUTOGRAD._engine_run_backward = self._watched

    def close(self) -> None:
        if _AUTOGRAD._engine_run_backward is self._watched:
            _AUTOGRAD._engine_run_backward = self._run

    def _watched_run(self) -> Callable[..., Any]:
        original = self._run

        def run(outputs: Sequence[Any], gradients: Sequence[Any], *args: Any, **options: Any) -> Any:
            # inside of a backward a segment is computed again, and torch.compile runs the engine on no real tensors
            if self._is_running or type(outputs[0]) not in _REAL or is_functional():
                return original(outputs, gradients, *args, **options)
            self._is_running = True
            way = self._backward if options["accumulate_grad"] else self._grad
            try:
                return way(original, outputs, gradients, *args, **options)
            finally:
                self._is_running = False
                self._spine.root = self._spine.leaves = 1.0

        return run

    def _backward(
        self, run: Any, outputs: Sequence[Any], gradients: Sequence[Any], *args: Any, **options: Any
    ) -> Any:
        spine, loss = self._spine, outputs[0]
        if loss.numel() > 1 and self._losses_to_look_at and bool((gradients[0] == 1).all()):
            loss = loss.sum()
        spine.tell(Subscriber.backward_begins, loss)
        share = spine.at_hand
        if share is not None and len(self._loose) <= _FIRST_BATCHES:
            self._compare_loose(outputs[0], share)
        is_due = (
            self._losses_to_look_at or (spine.loss and spine.loss.sums) or (share and not share.batch_start)
        )
        if is_due and share is not None and loss.numel() == 1:
            self._losses_to_look_at -= self._losses_to_look_at > 0
            with _disable_current_modes():
                self._look_at(loss)
        elif not self._losses_to_look_at:
            self._terms = 0.0
        spine.root = spine.weight_of_loss()
        spine.leaves = self._counts_for_inputs(outputs) if spine.asks_for_leaves else 1.0
        spine.called.clear()
        with self.group.within("backward"), spine.models.exchanging():
            return run(outputs, _times(gradients, spine.root), *args, **options)

    def _grad(
        self,
        run: Any,
        outputs: Sequence[Any],
        gradients: Sequence[Any],
        retain_graph: bool,
        create_graph: bool,
        inputs: Sequence[Any],
        *args: Any,
        **options: Any,
    ) -> Any:
        """Collective where gradients of what is equal on all ranks are derived again: the whole batch's are meant.

        Others of such are this rank's own, as the loss is, and so are all of a single sample, as of MAML's tasks.
        """
        spine, size = self._spine, self.group.world.size
        share = spine.trained
        is_of_one = size > 1 and share is not None and _is_over_samples(share)
        is_in_forward = self.group.phase[0] == "forward"
        shapes = {one.shape for one in spine.models.parameters()} if is_in_forward or is_of_one else set()
        are_weights = shapes.issuperset(one.shape for one in inputs)
        if is_in_forward and are_weights:
            # in a model's call gradients of weights are of some of its samples, as of each of MAML's tasks
            mine = share.mine if create_graph and share and 1 < share.mine < share.all else 0
            terms = self._reduction_of(outputs[0])[1] if mine and outputs[0].numel() == 1 else None
            if mine and not (terms and terms % mine):
                self.group.say(
                    f"torch.autograd.grad ({users_line()}) derives weights inside a model's forward, of this rank's "
                    "samples alone; if all samples of the batch are meant, call it outside of forward",
                    what="slopes in forward",
                )
            return run(outputs, gradients, retain_graph, create_graph, inputs, *args, **options)
        # ranks may have unlike numbers of microbatches: what is derived there is each one's own
        is_whole = not is_of_one and (share is None or share.microbatch is None)
        is_shared = size > 1 and spine.models.weigh_losses and is_whole
        parameters = {id(one) for one in spine.models.parameters()} if is_shared else set()
        kept = [_is_kept(one, parameters) for one in inputs]
        spine.root = spine.leaves = spine.weight_of_loss()
        counts = (
            self._counts_for_kept(create_graph=create_graph)
            if any(kept)
            else self._counts_for_inputs(outputs)
        )
        if is_of_one:
            counts = self._counts_for_kept(create_graph=False) if are_weights else 1.0
        found = run(outputs, _times(gradients, counts), retain_graph, create_graph, inputs, *args, **options)
        if not retain_graph:
            spine.called.clear()
        if not create_graph or not any(kept):
            if is_shared and outputs[0].numel() == 1:
                # that of inputs divides by the whole batch: the ranks' slopes of what all share add up
                spine.tell(Subscriber.slopes_given, (inputs, found, not any(kept)))
            return found
        call = f"torch.autograd.grad ({users_line()})"
        return tuple(
            SumOverRanks.apply(one, call) / size if is_kept and one is not None else one  # type: ignore[no-untyped-call]
            for one, is_kept in zip(found, kept, strict=True)
        )

    def _counts_for_kept(self, *, create_graph: bool) -> float:
        """The same where gradients of weights are asked for; those that are derived again are added over ranks."""
        if create_graph:
            return self._spine.root
        return 1 / self.group.world.size if self._spine.models.adds() else 1.0

    def _reduction_of(self, loss: torch.Tensor) -> tuple[str | None, float | None]:
        """Whether it is a mean or a sum, and over how many terms; a sum divided by the whole batch's size is a sum.

        So are as many losses as this rank has samples, which the script has added; divided by that they are a mean.
        """
        found, share = reduction_of(loss), self._spine.trained
        count, mine = found.get("terms"), share.mine if share is not None else 0
        if found["reduction"] == "mean":
            is_sum = found["losses"] >= mine >= _MANY_LOSSES and found["divisor"] is None
            return ("sum", None) if is_sum else ("mean", mine if found["divisor"] == mine else count)
        if count is None:
            return found["reduction"], None
        is_sum = share is not None and share.mine < share.all == count
        return ("sum", None) if is_sum else ("mean", count)

    def _counts_for_inputs(self, outputs: Sequence[torch.Tensor]) -> float:
        """What a loss counts for where gradients of its samples are asked for: they divide by the whole batch."""
        spine = self._spine
        is_mean = outputs[0].numel() == 1 and self._reduction_of(outputs[0])[0] == "mean"
        if is_mean and not spine.models.adds() and (share := spine.trained) and share.microbatch is None:
            return spine.root / float(self.group.world.size)
        return 1.0 if spine.root else 0.0

    def _look_at(self, loss: torch.Tensor) -> None:
        """Say once that a loss is a sum, which averaging makes smaller; note a mean's terms, and what weighs it."""
        at, (reduction, count) = self._spine, self._reduction_of(loss)
        share, made = at.trained, at.loss or Averaged()
        adds = at.models.adds(leaves_before(loss))
        if reduction == "mean" and share is not None and not (share.lent or adds or made.does):
            self._terms, self._rows = count or 0.0, {one.all for one in at.open_shares}
        # where ranks are added, a mean is weighed by the number of this rank's terms
        if not adds:
            weights = weights_in(loss, _NEAR_NODES)
            digest = crc32(repr(weights).encode()).to_bytes(4)
            if self._count_of_weights < 0:
                self._count_of_weights, self._weights = len(weights), digest * 2
            if self._count_of_weights == len(weights):
                self._weights = self._weights[:4] + digest
        self._is_followed |= at.loss is not None
        is_sum = made.sums and not made.does if self._is_followed else reduction == "sum"
        if is_sum and not adds and self._trains(loss):
            self._losses_to_look_at = 0
            self.group.say(
                f"the loss ({users_line()}) has a sum over samples, and the gradients of ranks are averaged: it trains "
                f"with 1/{self.group.world.size} of the serial script's gradient; write "
                'replicate(model, loss="sum"), or where the loss has means too, samestep.sum(...) around the sum',
                what="a sum",
            )
        if adds and made.means and not made.does:
            self.group.say(
                f"the loss ({users_line()}) has a mean over this rank's samples, and the gradients of ranks are added: "
                f"it trains with {self.group.world.size} times the serial script's gradient; leave "
                'loss="sum" out, or divide the sum of the terms by samestep.sum of their number',
                what="a mean",
            )

    def _trains(self, loss: torch.Tensor) -> bool:
        """Without a trained parameter slopes of inputs are asked for, and what all ranks gathered is the batch's."""
        is_of_all = any(name_of(node) == "_MadeByAll" for node in nodes_before(loss.grad_fn, _NEAR_NODES))
        return not is_of_all and any(one.requires_grad for one in self._spine.models.parameters())

    def _unlike_weights(self, marks: list[bytes], call: str) -> None:
        """Say that ranks weigh their losses by numbers of their own samples; those that they drew are theirs."""
        if self._spine.weighed_by or len({mark[:4] for mark in marks}) == 1:
            where = f" ({line})" if (line := self._spine.weighed_by) else ""
            self.group.say(
                f"the loss is weighed by a number of this rank's samples{where}, and ranks have unlike ones, so it is "
                "not the serial script's: write samestep.mean(...) around what the number is made of",
                what="unlike weights",
            )

    def _unlike_terms(self, marks: list[bytes], call: str) -> None:
        """Say that a loss is a mean over terms of which ranks have neither as many for each sample nor all of them."""
        ranks = range(self.group.world.size)
        terms = [_TERMS.unpack(mark)[0] for mark in marks]
        shares = [[len(range(*cut(rows, len(ranks), rank))) for rank in ranks] for rows in self._rows]
        for mine in [[1] * len(ranks), *shares]:
            found = [count / part for count, part in zip(terms, mine, strict=True) if count and part]
            # what mixes samples is said already
            if not terms[0] or max(found) - min(found) <= 1e-9 * max(found):
                return
        self.group.say(
            "the loss is a mean over terms, and ranks have unlike numbers of them for each of their samples, as with "
            "ignore_index, class weights or padding; so it is not the mean of the whole batch: write "
            'replicate(model, loss="sum"), and divide the sum of the terms by samestep.sum of their number',
            what="unlike terms",
        )

    def _compare_loose(self, loss: torch.Tensor, share: Share) -> None:
        """Collective where a tensor that belongs to no replica gets gradients of a second batch; it has to be equal."""
        if share.microbatch is not None or not 1 < self.group.world.size <= share.all:
            return
        latest = self._loose.setdefault(share, [])
        if len(self._loose) > _FIRST_BATCHES:
            for found in self._loose.values():
                found.clear()
            return
        held = {id(one) for one in self._spine.models.parameters()}
        latest += [one for one in leaves_before(loss) if id(one) not in held]
        earlier = {id(one) for of, found in self._loose.items() if of is not share for one in found}
        again = [one for one in latest if id(one) in earlier]
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


def _times(gradients: Sequence[Any], factor: float) -> tuple[Any, ...]:
    return tuple(one if one is None or factor == 1.0 else one * factor for one in gradients)


def is_functional() -> bool:
    """Whether torch.func derives a function, or several gradients are taken at once: those are the script's affair."""
    return torch._C._functorch.maybe_current_level() is not None


def _is_over_samples(share: Share) -> bool:
    """Whether the script is in a loop over this rank's samples."""
    return is_over_samples(scripts_frame(sys._getframe(1)), share.mine or share.all)


def _is_kept(tensor: Any, parameters: set[int]) -> bool:
    """Whether all ranks have it: a parameter, what is made of such (MAML's fast weights), a number (IRM's scale)."""
    if not isinstance(tensor, torch.Tensor) or not parameters or tensor.grad_fn is None:
        is_one = not tensor.dim() or (isinstance(tensor, torch.nn.Parameter) and tensor.numel() == 1)
        return id(tensor) in parameters or (bool(parameters) and is_one and not tensor._is_view())

    def is_elementwise(node: Any) -> bool:
        return name_of(node).startswith(_ELEMENTWISE)

    def is_of_all(node: Any) -> bool:
        variable = getattr(node, "variable", None)
        if variable is None:
            return is_elementwise(node) or name_of(node) == SumOverRanks.__name__
        return id(variable) in parameters and variable.shape == tensor.shape

    nodes = list(nodes_before(tensor.grad_fn, _MOST_NODES + 1, is_elementwise))
    return len(nodes) <= _MOST_NODES and all(map(is_of_all, nodes))
