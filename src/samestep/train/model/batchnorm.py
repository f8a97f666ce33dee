"""BatchNorm over the whole batch, on any device and however unevenly the batch is shared."""

from typing import Any

import torch
import torch.distributed as dist

from samestep.errors import UsageError
from samestep.train.group.device import has_synced_kernels
from samestep.train.step import Share, spine

BATCH_NORMS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm)


class _Everyones(torch.autograd.Function):
    """The sum over ranks; every rank's loss depends on it, so its gradient is the sum over ranks too."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor) -> torch.Tensor:
        return _all_reduced(part)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return _all_reduced(gradient.contiguous())


def _all_reduced(part: torch.Tensor) -> torch.Tensor:
    whole = part.clone()
    with spine().group.waiting("BatchNorm"):
        dist.all_reduce(whole)
    return whole


class Synced:
    """Mixed into a BatchNorm: statistics of all ranks, by torch's kernels where those can."""

    plain: type[torch.nn.Module]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        assert isinstance(self, BATCH_NORMS)
        at_hand = spine().trained
        by_torch = isinstance(self, torch.nn.SyncBatchNorm) and not lends(at_hand, dist.get_world_size())
        if not self.training or by_torch:
            return super().forward(input)  # type: ignore[misc,no-any-return]
        keep = 0.0 if at_hand is not None and at_hand.lent else 1.0
        over = [axis for axis in range(input.dim()) if axis != 1]
        shape = [1, -1] + [1] * (input.dim() - 2)
        wide = input.to(torch.promote_types(input.dtype, torch.float32))
        count = wide.new_full((1,), keep * (wide.numel() // wide.shape[1]))
        total: torch.Tensor = _Everyones.apply(torch.cat([wide.sum(over) * keep, count]))  # type: ignore[no-untyped-call]
        count = total[-1].detach()
        may_be_alone = at_hand is None or at_hand.all < 2  # else it is not asked: that waits for the device
        if may_be_alone and count < 2:
            raise UsageError(
                f"BatchNorm got {count:g} value per channel in the whole batch; train on at least 2"
            )
        mean = total[:-1] / count
        apart = wide - mean.reshape(shape)
        variance: torch.Tensor = _Everyones.apply(apart.square().sum(over) * keep) / count  # type: ignore[no-untyped-call]
        _follow(self, mean.detach(), variance.detach() * count / (count - 1))
        scaled: torch.Tensor = apart * torch.rsqrt(variance + self.eps).reshape(shape)
        if self.affine:
            scaled = scaled * self.weight.reshape(shape) + self.bias.reshape(shape)
        return scaled.to(input.dtype)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy is the BatchNorm that this one was."""
        state = {name: one for name, one in self.__dict__.items() if name != "plain"}
        return object.__new__, (self.plain,), state


class SyncedBatchNorm1d(Synced, torch.nn.BatchNorm1d):
    pass


class SyncedBatchNorm2d(Synced, torch.nn.BatchNorm2d):
    pass


class SyncedBatchNorm3d(Synced, torch.nn.BatchNorm3d):
    pass


class SyncedOnDevice(Synced, torch.nn.SyncBatchNorm):
    pass


_SYNCED: dict[type, type] = {
    torch.nn.BatchNorm1d: SyncedBatchNorm1d,
    torch.nn.BatchNorm2d: SyncedBatchNorm2d,
    torch.nn.BatchNorm3d: SyncedBatchNorm3d,
    torch.nn.SyncBatchNorm: SyncedOnDevice,
}


def convert(model: torch.nn.Module) -> None:
    """Make every BatchNorm of the model a synced one, in place; its tensors and hooks stay."""
    for module in model.modules():
        if type(module) not in _SYNCED:
            continue
        # torch's SyncBatchNorm has no CPU kernels, and DDP refuses one on CPU.
        tensors = (*module.parameters(), *module.buffers(), *model.parameters())
        on_device = bool(tensors) and has_synced_kernels(tensors[0].device)
        if on_device and not isinstance(module, torch.nn.SyncBatchNorm):
            module.__dict__["process_group"] = None
        module.__dict__["plain"] = type(module)
        module.__class__ = SyncedOnDevice if on_device else _SYNCED[type(module)]


def has_only_their_buffers(model: torch.nn.Module) -> bool:
    """Whether every buffer of the model is a BatchNorm's."""
    return all(
        isinstance(module, BATCH_NORMS) or next(module.buffers(recurse=False), None) is None
        for module in model.modules()
    )


def lends(share: Share | None, size: int) -> bool:
    """Whether a rank takes the step with weight 0, on samples that count for another: torch's kernels count them."""
    if share is None or not share.all:
        return False
    return (share.all if share.microbatch is None else share.microbatches) < size


@torch.no_grad()
def _follow(norm: torch.nn.Module, mean: torch.Tensor, variance: torch.Tensor) -> None:
    assert isinstance(norm, BATCH_NORMS)
    if not norm.track_running_stats or norm.running_mean is None or norm.running_var is None:
        return
    assert norm.num_batches_tracked is not None
    norm.num_batches_tracked += 1
    pace = 1.0 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
    norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), pace)
    norm.running_var.lerp_(variance.to(norm.running_var.dtype), pace)
