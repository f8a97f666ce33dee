"""BatchNorm with statistics of the whole batch, on any device and for uneven shares."""

import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from samestep.errors import UsageError
from samestep.text import counted
from samestep.train.backward import SumOverRanks
from samestep.train.group.device import has_synced_kernels
from samestep.train.passes import Share
from samestep.train.step import spine

_NO_SAMPLES = {
    True: "BatchNorm is in training mode in an evaluation, and its batch of {} leaves ranks without one; call "
    "model.eval() before the evaluation and model.train() after it, or give its loader drop_last=True",
    False: "BatchNorm has no running statistics and takes a batch's in an evaluation, where a batch of {} leaves ranks "
    "without one; give its loader drop_last=True, or leave track_running_stats=False out",
}

# where the operation of a layer has its bias
_BIAS_AT = {"ConvolutionBackward0": 2, "AddmmBackward0": 0}
BATCH_NORMS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm)


class Synced:
    """Mixed into a BatchNorm: takes statistics over all ranks, with torch's kernels where these can do it."""

    # torch's kernels cannot be derived twice, as a gradient penalty asks. So a layer's first calls do without them, and
    # all calls once the script has derived anything twice. A commit keeps both facts.

    plain: type[torch.nn.Module]
    # what SyncBatchNorm.forward reads
    process_group = None
    _check_non_zero_input_channels = torch.nn.SyncBatchNorm._check_non_zero_input_channels
    early_calls = 3

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        assert isinstance(self, BATCH_NORMS)
        share = spine().origins.trained
        # without running statistics an evaluation takes those of its batch; outside of a loader each rank has all of it
        if not self.training and (self.running_mean is not None or share is None):
            return super().forward(input)  # type: ignore[misc,no-any-return]
        if share is not None and not share.of.training and 0 < share.all < dist.get_world_size():
            raise UsageError(_NO_SAMPLES[self.training].format(counted(share.all, "sample")))
        is_early = self.early_calls > 0
        if is_early:
            self.early_calls -= 1
            if not torch.compiler.is_compiling():
                spine().undone.update(_biases_before(input))
        fits = has_synced_kernels(input.device) and not lends(share, dist.get_world_size())
        if fits and self.training and not is_early and not spine().derives_twice:
            return torch.nn.SyncBatchNorm.forward(self, input)  # type: ignore[arg-type]
        wide = input.to(torch.promote_types(input.dtype, torch.float32))
        with _disable_current_modes():  # statistics have no batch dimension to follow
            count, mean, variance = _of_all_ranks(wide, share)
        # reading the count waits for the device, so it is read only where the batch may be too small
        if (share is None or share.all < 2) and count < 2:
            raise UsageError(
                f"BatchNorm got {count:g} value per channel in the whole batch; train on at least 2"
            )
        _follow(self, mean.detach(), variance.detach() * count / (count - 1))
        weight, bias = (self.weight, self.bias) if self.affine else (1.0, 0.0)
        scale = torch.rsqrt(variance + self.eps) * weight
        # the fastest kernel for (wide - mean) * scale + bias is a BatchNorm in evaluation; it takes the mean as a
        # constant, so the mean's gradient comes from (fixed - mean) * scale, which is 0
        fixed, ones = mean.detach(), torch.ones_like(mean)
        shift = bias + (fixed - mean) * scale
        return torch.batch_norm(wide, scale, shift, fixed, ones, False, 0.0, 0.0, False).to(input.dtype)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy or pickle is the plain BatchNorm."""
        own = {"plain", "early_calls"}
        state = {name: value for name, value in self.__dict__.items() if name not in own}
        return object.__new__, (self.plain,), state


_SYNCED: dict[type, type] = {
    plain: type(f"Synced{plain.__name__}", (Synced, plain), {}) for plain in BATCH_NORMS
}


def convert(model: torch.nn.Module) -> None:
    """Make every BatchNorm of the model a synced BatchNorm, in place; its tensors and hooks stay."""
    for module in model.modules():
        if type(module) in _SYNCED:
            module.__dict__["plain"] = type(module)
            module.__class__ = _SYNCED[type(module)]


def _biases_before(input: torch.Tensor) -> Iterator[tuple[int, weakref.ref[torch.Tensor]]]:
    """The bias that a linear or convolutional layer has added to the input; BatchNorm takes it away again."""
    node = input.grad_fn
    if node is not None and (at := _BIAS_AT.get(node.name())) is not None:
        # the operation has none where the layer has no bias
        variables = (getattr(leaf, "variable", None) for leaf, _ in node.next_functions[at : at + 1])
        yield from ((id(bias), weakref.ref(bias)) for bias in variables if bias is not None)


def has_only_their_buffers(model: torch.nn.Module) -> bool:
    return all(
        isinstance(module, BATCH_NORMS) or next(module.buffers(recurse=False), None) is None
        for module in model.modules()
    )


def lends(share: Share | None, size: int) -> bool:
    """Whether a rank takes this step with weight 0, on lent samples; torch's kernels would count them."""
    if share is None or not share.all:
        return False
    return (share.all if share.microbatch is None else share.microbatches) < size


class _Statistics(torch.autograd.Function):
    """Each channel's mean and variance over this rank's rows, by the kernel of torch's own BatchNorm on a CPU."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if rows.is_cpu:
            mean, variance = torch.batch_norm_update_stats(rows, None, None, 0.0)
        else:
            over = [axis for axis in range(rows.dim()) if axis != 1]
            variance, mean = torch.var_mean(rows, over, correction=0)
        ctx.save_for_backward(rows, mean)
        return mean, variance

    @staticmethod
    def backward(ctx: Any, of_mean: torch.Tensor, of_variance: torch.Tensor) -> torch.Tensor:
        rows, mean = ctx.saved_tensors
        each, shape = rows.numel() // len(mean), [1, -1] + [1] * (rows.dim() - 2)
        slope = of_variance * (2 / each)
        centred = rows - mean.reshape(shape)
        return torch.addcmul((of_mean / each).reshape(shape), centred, slope.reshape(shape))


def _of_all_ranks(rows: torch.Tensor, share: Share | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Collective. Each channel's number of values, mean and variance, with one exchange in forward and in backward."""
    over = [axis for axis in range(rows.dim()) if axis != 1]
    channels, each = rows.shape[1], rows.numel() // rows.shape[1]
    mean, variance = _Statistics.apply(rows) if each else (rows.sum(over), rows.sum(over))  # type: ignore[no-untyped-call]
    own = torch.cat([mean, variance, rows.new_ones(1)]) * (each * (share is None or not share.lent))
    rank, size = dist.get_rank(), dist.get_world_size()
    alone = torch.nn.functional.pad(own[None], (0, 0, rank, size - 1 - rank))
    every: torch.Tensor = SumOverRanks.apply(alone, "BatchNorm")  # type: ignore[no-untyped-call]
    numbers = every[:, -1:].detach()
    count = numbers.sum()
    means = every[:, :channels] / numbers.clamp(min=1)
    mean = every[:, :channels].sum(0) / count
    squares = every[:, channels:-1] + numbers * (means - mean).square()
    variance = squares.sum(0) / count
    if share is None or len(rows) * size != share.all:
        # a batch that every rank has, such as fixed noise for samples, has each value once
        is_alike = (every == every[0]).all() & (count > size)
        count = torch.where(is_alike, numbers[0, 0], count)
    return count, mean, variance


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
