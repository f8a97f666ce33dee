"""How the gradients of a model's replicas become everyone's: a bucket goes in, a future of its total comes out.

`Exchange` is DDP's own all-reduce. `TreeExchange` adds over the microbatches of a step in a fixed tree: the same
bits at any number of processes. A replica is composed with one of them.
"""

import json
import os
import time
import weakref
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from samestep.errors import UsageError
from samestep.train.group.device import SideStreams, moved, widest
from samestep.train.group.group import Group
from samestep.train.model.tree_sum import Blocks, Sender, Vectors, add_up, layout
from samestep.train.nested import map_tensors
from samestep.train.step import Share, Spine, Subscriber

Total = torch.futures.Future[torch.Tensor]
_TWICE = "backward ran twice in one microbatch of an exact step; add the losses and call backward once"


class Exchange(Subscriber):
    """DDP's own all-reduce, weighed by the share; the buffers of the model are not its business."""

    needs_microbatches = False
    sums_buffers = False
    ddp_options: ClassVar[dict[str, Any]] = {"gradient_as_bucket_view": True}

    def __init__(self, *, sums: bool = False) -> None:
        """`sums`: the loss is a sum over samples, so that the gradients of ranks are added and not averaged."""
        self.sums = sums

    def attach(self, ddp: DistributedDataParallel) -> None:
        """Take over the exchange of this DDP."""
        if path := os.environ.get("SAMESTEP_RECORD_BUCKETS"):
            ddp.register_comm_hook(_Record(path if dist.get_rank() == 0 else os.devnull), _recorded)

    def reached(self, output: Any) -> Any:
        """The model's output of this rank's last microbatch, before backward goes through it."""
        return output

    def average(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Collective. Make gradients everyone's that DDP has not exchanged; a rank may lack some."""
        has_some = moved(
            torch.tensor([float(one.grad is not None) for one in parameters], device="cpu"),
            parameters[0].device,
        )
        dist.all_reduce(has_some)
        for parameter in (one for one, some in zip(parameters, has_some.tolist(), strict=True) if some):
            mine = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            total = mine.to_dense().contiguous() / dist.get_world_size()
            dist.all_reduce(total)
            if parameter.grad is None or mine.is_sparse:
                parameter.grad = total.to_sparse() if mine.is_sparse else total
            else:
                parameter.grad.copy_(total)  # DDP keeps it in a bucket

    def close(self) -> None:
        """Give back threads and process groups."""


def broadcast(tensor: torch.Tensor) -> None:
    """Collective. Rank 0's values, in place, whatever the strides."""
    sent = tensor.detach().contiguous()
    dist.broadcast(sent, src=0)
    if sent.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(sent)


class _Record:
    """For `samestep scale --predict`: a line for each step, with when its buckets were ready, and their bytes."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._seen: list[tuple[float, int]] = []

    def note(self, bucket: dist.GradBucket) -> None:  # type: ignore[name-defined]
        self._seen.append((time.monotonic(), bucket.buffer().nbytes))
        if bucket.is_last():
            with open(self._path, "a") as file:
                print(json.dumps(self._seen), file=file)
            self._seen = []


def _recorded(record: _Record, bucket: dist.GradBucket) -> Total:  # type: ignore[name-defined]
    """As DDP's comm hook: nothing is exchanged, so that each bucket is seen when backward has made it."""
    record.note(bucket)
    done: Total = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


class _Reach(torch.autograd.Function):
    """Identity that puts every parameter into the graph, so that DDP's hooks all fire."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.others = len(parameters)
        return output.clone()

    @staticmethod
    def backward(ctx: Any, *gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (*gradient, *[None] * ctx.others)


class TreeExchange(Exchange):
    """Gradients of all but this rank's last microbatch stay here; the last takes their sums along.

    Floating-point buffers change by the weighted mean of what each microbatch changed in them.
    """

    needs_microbatches = True
    sums_buffers = True
    # `find_unused_parameters` sees only the last microbatch; `reached` does its work for all of them.
    ddp_options: ClassVar[dict[str, Any]] = {
        "gradient_as_bucket_view": False,
        "find_unused_parameters": False,
    }

    def __init__(
        self, model: torch.nn.Module, group: Group, *, some_unused: bool, sums: bool = False
    ) -> None:
        super().__init__(sums=sums)
        self._group, self._spine = group, group.the(Spine)
        self._some_unused = some_unused
        self._parameters = [one for one in model.parameters() if one.requires_grad]
        self._index = {id(one): at for at, one in enumerate(self._parameters)}
        # By name: a forward that writes `self.mean = …` puts another tensor there. What counts comes last.
        places = {
            buffer: (module, name)
            for module in model.modules()
            for name, buffer in module.named_buffers(recurse=False)
        }
        self._places = [
            places[buffer] for buffer in sorted(places, key=lambda one: not one.is_floating_point())
        ]
        self._floating = sum(buffer.is_floating_point() for buffer in places)
        self._gradients, self._changes = Blocks(), Blocks()
        self._earlier: list[torch.Tensor | None] = []
        self._sent: set[int] = set()
        self._used = bytearray(len(self._parameters))
        self._sender: Sender | None = None

    def attach(self, ddp: DistributedDataParallel) -> None:
        side = self._group.the(SideStreams).of_exchanges
        self._sender = Sender(self._group.world.device, side, self._group.timeout)
        weakref.finalize(self, self._sender.dismiss).atexit = False
        # DDP must not hold the exchange whose replica holds DDP: the collector does not see through DDP.
        ddp.register_comm_hook(weakref.ref(self), _sent_by)

    def average(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        raise UsageError(_TWICE)

    def reached(self, output: Any) -> Any:
        return map_tensors(self._reach, output) if self._some_unused else output

    def _reach(self, tensor: torch.Tensor) -> Any:
        return _Reach.apply(tensor, *self._parameters) if tensor.requires_grad else tensor  # type: ignore[no-untyped-call]

    def close(self) -> None:
        if self._sender is not None:
            self._sender.stop()

    def microbatch_begins(self, share: Share) -> None:
        if not share.first:
            return
        self._gradients, self._changes = Blocks(), Blocks()
        self._sent.clear()
        self._used = bytearray(len(self._parameters))
        self._earlier = [one.grad for one in self._parameters]
        self._held = self._buffers()
        self._before = self._values(self._held)
        self._counts_before = [one.clone() for one in self._held[self._floating :]]
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def microbatch_ends(self, share: Share) -> None:
        assert share.microbatch is not None
        weight = share.mine / share.all
        found, held = self._buffers(), self._held
        if self._before is not None and not share.lent:
            now = self._values(found)
            assert now is not None
            self._changes.push(share.microbatch, 1, [(now - self._before) * weight])
        self._bring_back(self._before)
        counts = found[self._floating :] if share.last else self._counts_before
        if counts:
            torch._foreach_copy_(held[self._floating :], counts)
        for (module, name), buffer in zip(self._places, held, strict=True):
            setattr(module, name, buffer)
        if self._sender is None or not share.last:
            self._gradients.push(share.microbatch, 1, self._take_gradients(self._weight(share)))
        if share.last:
            self._end_step(share)

    def _end_step(self, share: Share) -> None:
        if self._sender is None:
            for parameter, total in zip(self._parameters, self._gradients.fold(), strict=True):
                parameter.grad = total
        if self._sender is None or self._some_unused:
            everyones = self._group.all_gather("samestep.replicate's unused parameters", bytes(self._used))
            for parameter, *used in zip(self._parameters, *everyones, strict=True):
                if not any(used):
                    parameter.grad = None
        for parameter, earlier in zip(self._parameters, self._earlier, strict=True):
            if earlier is not None:
                parameter.grad = earlier if parameter.grad is None else earlier + parameter.grad
        self._earlier = []
        if self._before is not None:
            self._bring_back(self._before + self._everyones_change(share, self._before))

    def send(self, bucket: dist.GradBucket) -> Total:  # type: ignore[name-defined]
        """What earlier microbatches left joins the bucket of the last one, and all ranks' sums are added."""
        share, sender = self._spine.trained, self._sender
        assert share is not None
        assert sender is not None
        index, weight = share.microbatch, self._weight(share)
        assert index is not None
        buffer, views, parameters = bucket.buffer(), bucket.gradients(), bucket.parameters()
        places = self._places_of(parameters)
        for at in places:
            self._used[at] |= not share.lent and self._parameters[at].grad is not None

        def job() -> torch.Tensor:
            blocks = Blocks()
            for start, size, vectors in self._gradients:
                flat = torch.zeros_like(buffer)
                of_bucket = torch.view_as_complex(flat.view(-1, 2)) if parameters[0].is_complex() else flat
                into = [
                    of_bucket.as_strided(
                        parameter.size(), _strides(parameter), view.storage_offset() - buffer.storage_offset()
                    )
                    for view, parameter in zip(views, parameters, strict=True)
                ]
                torch._foreach_copy_(into, [vectors[at] for at in places])
                blocks.push(start, size, [flat])
            if not share.lent:
                blocks.push(index, 1, [buffer.mul_(weight)])
            own = [vectors[0] for _, _, vectors in blocks]
            return add_up(own, buffer, layout(share.microbatches, self._group.world.size), sender.group)

        return sender.send(job)

    def _weight(self, share: Share) -> float:
        return float(not share.lent) if self.sums else share.mine / share.all

    def _places_of(self, parameters: Sequence[torch.Tensor]) -> list[int]:
        once = {id(parameter) for parameter in parameters}
        if once & self._sent:
            raise UsageError(_TWICE)
        self._sent |= once
        return [self._index[id(parameter)] for parameter in parameters]

    def _buffers(self) -> Vectors:
        return [getattr(module, name) for module, name in self._places]

    def _values(self, buffers: Vectors) -> torch.Tensor | None:
        """What the floating-point ones hold, as one tensor: a few operations whatever the number of layers."""
        device = self._group.world.device
        flat = [moved(buffer.reshape(-1), device) for buffer in buffers[: self._floating]]
        return torch.cat(flat).to(widest(device)) if flat else None

    def _bring_back(self, values: torch.Tensor | None) -> None:
        if values is not None:
            held = self._held[: self._floating]
            parts = torch.split(values, [buffer.numel() for buffer in held])
            torch._foreach_copy_(held, [part.view_as(one) for part, one in zip(parts, held, strict=True)])

    def _take_gradients(self, weight: float) -> Vectors:
        taken = []
        for at, parameter in enumerate(self._parameters):
            gradient = parameter.grad
            self._used[at] |= gradient is not None
            taken.append(torch.zeros_like(parameter) if gradient is None else gradient.detach())
            parameter.grad = None
        return list(torch._foreach_mul(taken, weight)) if taken else []

    def _everyones_change(self, share: Share, like: torch.Tensor) -> torch.Tensor:
        sender = self._sender
        if sender is None:
            return self._changes.fold()[0]
        own = [vectors[0] for _, _, vectors in self._changes]
        ranks = layout(share.microbatches, self._group.world.size)
        return sender.send(lambda: add_up(own, like, ranks, sender.group)).wait()


def _sent_by(exchange: "weakref.ref[TreeExchange]", bucket: dist.GradBucket) -> Total:  # type: ignore[name-defined]
    """As DDP's comm hook."""
    found = exchange()
    assert found is not None
    return found.send(bucket)


def _strides(parameter: torch.Tensor) -> tuple[int, ...]:
    """As DDP lays a gradient into its bucket: by the parameter's own strides, where these leave no gaps."""
    own = parameter.stride()
    if torch.empty_like(parameter, device="meta").stride() == own:
        return own
    return torch.empty(parameter.size(), device="meta").stride()


def times_of(ddp: DistributedDataParallel) -> tuple[float, float]:
    """Seconds of the latest exchange that DDP timed, and of it those in which backward went on.

    DDP times its first ten steps and each hundredth; nothing public of torch 2.13 tells them.
    """
    seen = ddp._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    exchanged, hidden = (seen.get(f"backward_{name}_time", 0) for name in ("comm", "compute_comm_overlap"))
    return exchanged / 1e9, hidden / 1e9
