"""What is exchanged of a model beside what DDP's own all-reduce exchanges, and what is known of that."""

import json
import os
import time
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from samestep.train.group.device import moved


def average(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Collective. Make gradients everyone's that DDP has not exchanged; a rank may lack some."""
    has_some = moved(
        torch.tensor([float(parameter.grad is not None) for parameter in parameters], device="cpu"),
        parameters[0].device,
    )
    dist.all_reduce(has_some)
    for parameter, some in zip(parameters, has_some.tolist(), strict=True):
        if not some:
            continue
        mine = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        total = mine.to_dense().contiguous() / dist.get_world_size()
        dist.all_reduce(total)
        if parameter.grad is None or mine.is_sparse:
            parameter.grad = total.to_sparse() if mine.is_sparse else total
        else:
            parameter.grad.copy_(total)  # DDP keeps it in a bucket


def broadcast(tensors: Iterable[torch.Tensor]) -> None:
    """Collective. Rank 0's values, in place, whatever the strides."""
    for tensor in tensors:
        sent = tensor.detach().contiguous()
        dist.broadcast(sent, src=0)
        if sent.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(sent)


def record_buckets(ddp: DistributedDataParallel) -> None:
    """For `samestep scale --predict`: exchange nothing, and write when each bucket was ready, and its bytes."""
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
    """Seconds of the latest exchange that DDP timed, and of it those in which backward went on.

    DDP times its first ten steps and each hundredth; nothing public of torch 2.13 tells them.
    """
    seen = ddp._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    exchanged, hidden = (seen.get(f"backward_{name}_time", 0) for name in ("comm", "compute_comm_overlap"))
    return exchanged / 1e9, hidden / 1e9
