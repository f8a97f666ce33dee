"""What surrounds DDP's all-reduce: models are compared before it, other tensors exchanged, hooks called after it."""

import json
import os
import time
from binascii import crc32
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from samestep.errors import RanksDiffer
from samestep.hang import NEW_ORDER
from samestep.text import name_ranks
from samestep.train.group.device import moved
from samestep.train.group.group import Group, Member


class Turns(Member):
    """Compares in which order ranks exchange their models' gradients: DDP mixes those of models of equal sizes."""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self._order, self._before, self._usual = 0, -1, set[tuple[int, int]]()
        group.watch(lambda: self._order, _unlike_order)

    def take(self, number: int, kind: str) -> str:
        """Note an exchange of the model with this number; its name in a report, with what is unusual in its turn."""
        self._order, name = crc32(number.to_bytes(4), self._order), f"model {number + 1} ({kind})"
        before, turn = self._before, (self._before, number)
        is_new = bool(self._usual) and turn not in self._usual
        self._before = number
        self._usual.add(turn)
        return f"{name}{NEW_ORDER}model {before + 1}" if is_new else name


def _unlike_order(orders: list[int], call: str) -> None:
    fewest = min(Counter(orders).values())
    odd = [rank for rank, order in enumerate(orders) if orders.count(order) == fewest]
    how = "in different orders" if len(odd) == len(orders) else "in another order than the other ranks"
    raise RanksDiffer(
        f"{name_ranks(odd)} called backward() of the models {how}, so gradients of different models were added; call "
        "backward() of the same models in the same order on every rank",
        ranks=odd,
        call=call,
    )


def check_alike(model: torch.nn.Module, group: Group) -> None:
    """Collective. Raise where models differ: DDP pairs parameters by position, and would mix them silently."""
    named = {"parameters": model.named_parameters(), "buffers": model.named_buffers()}
    mine = {
        kind: [
            f"{name} {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
            f"{' (frozen)' * (kind == 'parameters' and not tensor.requires_grad)}"
            for name, tensor in tensors
        ]
        for kind, tensors in named.items()
    }
    ranks = group.all_gather("samestep.replicate", mine)
    for rank, theirs in enumerate(ranks):
        for kind in mine:
            if theirs[kind] != ranks[0][kind]:
                difference = _difference(kind, ranks[0][kind], rank, theirs[kind])
                raise RanksDiffer(f"{difference}; build the same model on every rank", ranks=[rank])


def _difference(kind: str, ours: list[str], rank: int, theirs: list[str]) -> str:
    if len(ours) != len(theirs):
        shorter, longer = sorted(([fact.split()[0] for fact in facts] for facts in (ours, theirs)), key=len)
        extra = next(name for name in longer if name not in shorter)
        counts = f"{len(ours)} {kind} on rank 0 and {len(theirs)} on rank {rank}"
        return f"replicate found {counts} (first difference: {extra})"
    mine, other = next(pair for pair in zip(ours, theirs, strict=True) if pair[0] != pair[1])
    return f"replicate found {mine} on rank 0 and {other} on rank {rank}"


def average(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Collective. Average gradients that DDP has not exchanged."""
    for parameter, total in averages(parameters):
        if parameter.grad is None:
            parameter.grad = total
        elif parameter.grad.is_sparse:
            parameter.grad = total.to_sparse()
        else:
            parameter.grad.copy_(total)  # DDP keeps it in a bucket


def averages(parameters: Sequence[torch.nn.Parameter]) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    """Collective. The averages of gradients over the ranks, of which some may have none."""
    has_some = moved(
        torch.tensor([float(parameter.grad is not None) for parameter in parameters], device="cpu"),
        parameters[0].device,
    )
    dist.all_reduce(has_some)
    for parameter, any_rank in zip(parameters, has_some.tolist(), strict=True):
        if any_rank:
            mine = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            total = mine.to_dense().contiguous() / dist.get_world_size()
            dist.all_reduce(total)
            yield parameter, total


def broadcast(tensors: Iterable[torch.Tensor]) -> None:
    """Collective. Copy rank 0's values into the tensors of all ranks, whatever their strides."""
    for tensor in tensors:
        sent = tensor.detach().contiguous()
        dist.broadcast(sent, src=0)
        if sent.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(sent)


def hooks_on(parameter: torch.Tensor, ours: Container[int]) -> list[list[Callable[..., Any]]]:
    """The script's hooks: those that get the gradient before it is added to `.grad`, and those that run after it."""
    kinds = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    return [[hook for key, hook in (hooks or {}).items() if key not in ours] for hooks in kinds]


class HeldHooks:
    """The script's hooks on a parameter, kept back during a backward: DDP exchanges the gradient after them."""

    def __init__(self, parameter: torch.Tensor, ours: Container[int], arrived: list["HeldHooks"]) -> None:
        """In this backward they are added to `arrived` when the parameter gets its gradient."""
        self._parameter, self._hooks = parameter, hooks_on(parameter, ours)
        self._before = None if parameter.grad is None else parameter.grad.clone()
        kinds: Any = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
        self._kept = [(hooks, dict(hooks)) for hooks in kinds if hooks]
        for hooks, kept in self._kept:
            hooks.clear()
            hooks.update((key, hook) for key, hook in kept.items() if key in ours)
        self._arrival = parameter.register_post_accumulate_grad_hook(lambda _: arrived.append(self))  # type: ignore[no-untyped-call]

    def put_back(self) -> None:
        self._arrival.remove()
        for hooks, kept in self._kept:
            hooks.clear()
            hooks.update(kept)

    def run(self) -> None:
        """Call the hooks with the whole batch's gradient of this backward, if the parameter got any."""
        total, before = self._parameter.grad, self._before
        if total is None or (before is not None and not total.is_sparse and torch.equal(total, before)):
            return
        of_gradient, of_parameter = self._hooks
        if of_gradient:
            gradient = total.clone() if before is None else total - before
            for hook in of_gradient:
                if (changed := hook(gradient)) is not None:
                    gradient = changed
            gradient = gradient if before is None else before + gradient
            if total.is_sparse or total.requires_grad:
                self._parameter.grad = gradient
            else:
                total.copy_(gradient)  # DDP keeps it in a bucket
        for hook in of_parameter:
            hook(self._parameter)


def record_buckets(ddp: DistributedDataParallel) -> None:
    """For `samestep scale --predict`: exchange nothing, and write each bucket's size and the time it was ready."""
    path = os.environ["SAMESTEP_RECORD_BUCKETS"] if dist.get_rank() == 0 else os.devnull
    seen: list[tuple[float, int]] = []

    def note(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        seen.append((time.monotonic(), bucket.buffer().nbytes))
        if bucket.is_last():
            with open(path, "a") as file:
                print(json.dumps(seen), file=file)
            seen.clear()
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    ddp.register_comm_hook(None, note)


def times_of(ddp: DistributedDataParallel) -> tuple[float, float]:
    """Seconds of the latest exchange that DDP timed, and how many of them overlapped with backward."""
    # DDP times its first ten steps and every hundredth; torch 2.13 has no public function for these times.
    seen = ddp._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    exchanged, hidden = (seen.get(f"backward_{name}_time", 0) for name in ("comm", "compute_comm_overlap"))
    return exchanged / 1e9, hidden / 1e9
