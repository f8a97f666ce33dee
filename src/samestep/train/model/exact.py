"""The same bits at any number of processes, for a model whose microbatches come from `steps`.

Covered: the sum of gradients and of what BatchNorm remembers (one tree over the step's microbatches), random
draws (a function of seed, epoch, step and microbatch), deterministic kernels, one thread count.
Not covered: another kind of hardware, torch version or thread count, which `arithmetic` names, or microbatch size.
"""

import os
import platform
import weakref
from typing import Any

import torch
import torch.distributed as dist

from samestep.errors import UsageError
from samestep.train.data import share
from samestep.train.group.control import meet
from samestep.train.group.world import World
from samestep.train.model.replica import Replica, only_in, replicas
from samestep.train.model.tree_sum import Blocks, Courier, Vectors, add_up, layout
from samestep.train.nested import map_tensors


class _Reach(torch.autograd.Function):
    """Identity through which backward comes by every parameter, with no gradient, so that DDP misses none."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.others = len(parameters)
        return output.clone()

    @staticmethod
    def backward(ctx: Any, *gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (*gradient, *[None] * ctx.others)


class ExactReplica(Replica):
    """Gradients of all but this rank's last microbatch stay here; the last takes their sums along."""

    def __init__(self, model: torch.nn.Module, options: dict[str, Any], world: World) -> None:
        fix_arithmetic()
        # DDP's own search asks for the last microbatch alone, and takes one used before it for unused.
        self._some_unused = bool(options.get("find_unused_parameters"))
        fixed = {"gradient_as_bucket_view": False, "find_unused_parameters": False}
        super().__init__(model, {**options, **fixed}, world)
        self.moves_buffers = False
        self._parameters = [one for one in model.parameters() if one.requires_grad]
        self._index = {id(one): at for at, one in enumerate(self._parameters)}
        # By name, for a forward that writes `self.mean = …` puts another tensor there; what counts comes last.
        places = {
            one: (module, name)
            for module in model.modules()
            for name, one in module.named_buffers(recurse=False)
        }
        self._places = [places[one] for one in sorted(places, key=lambda one: not one.is_floating_point())]
        self._floating = sum(one.is_floating_point() for one in places)
        self._gradients, self._changes = Blocks(), Blocks()
        self._earlier: list[torch.Tensor | None] = []
        self._sent: set[int] = set()
        self._used = bytearray(len(self._parameters))
        self._courier: Courier | None = None
        if self.ddp is not None:
            self._courier = Courier(world.device)
            weakref.finalize(self, self._courier.dismiss).atexit = False
            self.ddp.register_comm_hook(weakref.ref(self), _exchanged)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        at_hand = share.current()
        # a network may be trained in eval() mode, for its BatchNorm to stay as it is
        in_training = self.model.training or (at_hand is not None and at_hand.training)
        if not torch.is_grad_enabled() or not in_training:
            return self.own_forward(*args, **kwargs)
        if at_hand is None or at_hand.index is None:
            raise UsageError(
                "replicate(exact=True) adds gradients over microbatches and there is none here; "
                "take the training batches from samestep.steps"
            )
        self.note_call(at_hand)
        if self.ddp is None or not at_hand.last:
            return only_in(at_hand, self.own_forward(*args, **kwargs))
        output = self.exchanged(*args, **kwargs)
        if self._some_unused:
            output = map_tensors(self._reach, output)
        return only_in(at_hand, output)

    def _reach(self, one: torch.Tensor) -> Any:
        return _Reach.apply(one, *self._parameters) if one.requires_grad else one  # type: ignore[no-untyped-call]

    def equal_tensors(self) -> dict[str, torch.Tensor]:
        return {**super().equal_tensors(), **dict(self.model.named_buffers())}

    def begin_step(self) -> None:
        self._gradients, self._changes = Blocks(), Blocks()
        self._sent.clear()
        self._used = bytearray(len(self._parameters))
        self._earlier = [one.grad for one in self._parameters]
        self._held = self._buffers()
        self._before = [one.clone() for one in self._held]
        for one in self._parameters:
            one.grad = None

    @torch.no_grad()
    def end_microbatch(self, at_hand: share.Pass) -> None:
        assert at_hand.index is not None
        weight = at_hand.mine / at_hand.all
        found = self._buffers()
        floating, before = found[: self._floating], self._before[: self._floating]
        if not at_hand.lent:
            pairs = zip(floating, before, strict=True)
            changes = [(now.double() - then.double()) * weight for now, then in pairs]
            self._changes.push(at_hand.index, 1, changes)
        counting = (found if at_hand.last else self._before)[self._floating :]
        for (module, name), one, value in zip(self._places, self._held, before + counting, strict=True):
            one.copy_(value)
            setattr(module, name, one)
        if self.ddp is None or not at_hand.last:
            self._gradients.push(at_hand.index, 1, self._take_gradients(weight))

    @torch.no_grad()
    def end_step(self, at_hand: share.Pass) -> None:
        if self.ddp is None:
            for one, total in zip(self._parameters, self._gradients.fold(), strict=True):
                one.grad = total
        if self.ddp is None or self._some_unused:
            everyones = meet("samestep.replicate's unused parameters", bytes(self._used))
            for one, *used in zip(self._parameters, *everyones, strict=True):
                if not any(used):
                    one.grad = None
        for one, earlier in zip(self._parameters, self._earlier, strict=True):
            if earlier is not None:
                one.grad = earlier if one.grad is None else earlier + one.grad
        self._earlier = []
        if floating := self._held[: self._floating]:
            for now, change in zip(floating, self._everyones_changes(at_hand, floating), strict=True):
                now.copy_(now.double() + change)

    def leave(self) -> None:
        super().leave()
        if self._courier is not None:
            self._courier.stop()

    def _buffers(self) -> Vectors:
        return [getattr(module, name) for module, name in self._places]

    def _take_gradients(self, weight: float) -> Vectors:
        taken = []
        for at, one in enumerate(self._parameters):
            self._used[at] |= one.grad is not None
            taken.append(torch.zeros_like(one) if one.grad is None else one.grad.detach() * weight)
            one.grad = None
        return taken

    def exchange(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        """What earlier microbatches left joins the last one's, and goes around."""
        at_hand = share.current()
        assert at_hand is not None
        assert at_hand.index is not None
        assert self._courier is not None
        index, count, lent = at_hand.index, at_hand.count, at_hand.lent
        weight = at_hand.mine / at_hand.all
        buffer, views, parameters = bucket.buffer(), bucket.gradients(), bucket.parameters()
        once = {id(one) for one in parameters}
        if once & self._sent:
            raise UsageError(
                "backward ran twice in one microbatch of an exact step; add the losses and call backward once"
            )
        self._sent |= once
        places = [self._index[id(one)] for one in parameters]
        for at in places:
            self._used[at] |= not lent and self._parameters[at].grad is not None

        def job() -> torch.Tensor:
            blocks = Blocks()
            for start, size, vectors in zip(
                self._gradients.starts, self._gradients.sizes, self._gradients.sums, strict=True
            ):
                flat = torch.zeros_like(buffer)
                whole = torch.view_as_complex(flat.view(-1, 2)) if parameters[0].is_complex() else flat
                for at, view, one in zip(places, views, parameters, strict=True):
                    offset = view.storage_offset() - buffer.storage_offset()
                    whole.as_strided(one.size(), _strides(one), offset).copy_(vectors[at])
                blocks.push(start, size, [flat])
            if not lent:
                blocks.push(index, 1, [buffer.mul_(weight)])
            assert self._courier is not None
            own = [vectors[0] for vectors in blocks.sums]
            return add_up(own, buffer, layout(count, self.world.size), self._courier.group)

        return self._courier.send(job)

    def _everyones_changes(self, at_hand: share.Pass, floating: Vectors) -> Vectors:
        if self._courier is None:
            return self._changes.fold()
        courier = self._courier
        like = torch.cat([one.reshape(-1).double() for one in floating])
        own = [torch.cat([one.reshape(-1) for one in vectors]) for vectors in self._changes.sums]
        ranks = layout(at_hand.count, self.world.size)
        total = courier.send(lambda: add_up(own, like, ranks, courier.group)).wait()
        parts = torch.split(total, [one.numel() for one in floating])
        return [part.view_as(one) for part, one in zip(parts, floating, strict=True)]


def _exchanged(
    replica: "weakref.ref[ExactReplica]",
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """As DDP's comm hook, by which DDP must not hold the replica that holds it: no collector sees that circle."""
    owner = replica()
    assert owner is not None
    return owner.exchange(bucket)


def _strides(parameter: torch.Tensor) -> tuple[int, ...]:
    """As DDP lays a gradient into its bucket: by the parameter's own strides, where these leave no gaps."""
    own = parameter.stride()
    if torch.empty_like(parameter, device="meta").stride() == own:
        return own
    return torch.empty(parameter.size(), device="meta").stride()


def in_exact_run() -> bool:
    """Local. Whether a model of this process was replicated with `exact`."""
    return any(isinstance(one, ExactReplica) for one in replicas())


def fix_arithmetic() -> None:
    """Deterministic kernels, and one thread count at any size: $SAMESTEP_EXACT_THREADS, or 1."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    asked = os.environ.get("SAMESTEP_EXACT_THREADS", "1")
    if not asked.isdigit() or not int(asked):
        raise UsageError(f"SAMESTEP_EXACT_THREADS is {asked!r}, no number of threads; use 1 or more")
    torch.set_num_threads(int(asked))


def arithmetic() -> dict[str, Any]:
    """What the promise of equal bits rests on; another value of one of these may change them."""
    return {
        "hardware": torch.cuda.get_device_name() if torch.cuda.is_available() else _processor(),
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
