"""The same bits at any number of processes, with all in the network that usually prevents it."""

import copy
import gc
import os
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

import samestep
from samestep import UsageError
from samestep.train.group.world import joined
from samestep.train.step import Spine

TRAINING = Path(__file__).parents[2] / "exact_training.py"


def digests(nest, size):
    """What each rank printed."""
    ranks = nest.start(TRAINING, size)
    assert nest.wait(ranks) == [0] * size, "\n".join(rank.said for rank in ranks)
    return [rank.said for rank in ranks]


@pytest.fixture(scope="module")
def alone(nest):
    return digests(nest, 1)[0]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_parameters_buffers_optimizer_and_metrics_have_the_bits_of_one_process(size, nest, alone):
    assert len(alone.split()) == 2
    assert digests(nest, size) == [alone] * size


def test_another_microbatch_is_another_computation(world):
    """So the test above would see it."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(16, 4), torch.randint(0, 2, (16,)))
    found = set()
    for microbatch in (1, 2, 4):
        torch.manual_seed(0)
        model = samestep.replicate(
            nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2)), exact=True
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in samestep.steps(data, 16, microbatch=microbatch):
            for x, y in step:
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
        found.add(str([parameter.tolist() for parameter in model.parameters()]))
    assert len(found) == 3


@pytest.mark.parametrize("exact", [False, True])
def test_a_model_that_is_dropped_is_freed(world, exact):
    def trained():
        model = samestep.replicate(nn.Linear(4, 2), exact=exact)
        for step in samestep.steps(TensorDataset(torch.randn(8, 4)), 8, microbatch=2):
            for (x,) in step:
                model(x).mean().backward()
        return weakref.ref(model)

    dropped = trained()
    gc.collect()
    assert dropped() is None


@pytest.mark.parametrize("used", [0, 1, 2])
def test_of_two_models_those_that_a_microbatch_used_are_stepped_on_every_rank(world, used):
    """A rank that called neither, and one that holds a model which others have dropped, exchange the same."""
    torch.manual_seed(0)
    rows = torch.randn(12, 4, dtype=torch.float64)
    models = [samestep.replicate(nn.Linear(4, 1).double(), exact=True) for _ in range(2)]
    if world.rank == 0:
        models.append(copy.deepcopy(models[0]))
    plain = copy.deepcopy(models[:2])
    for step in samestep.steps(TensorDataset(rows), 12, microbatch=2):
        for (x,) in step:
            for model in models[:used]:
                if torch.equal(x, rows[:2]):
                    model(x).square().mean().backward()
    for number, (model, serial) in enumerate(zip(models, plain, strict=False)):
        assert (model.weight.grad is not None) == (number < used)
        if number < used:
            serial(rows[:2]).square().mean().div(6).backward()
            assert torch.allclose(model.weight.grad, serial.weight.grad)


def test_batches_of_a_loader_are_refused(world):
    model = samestep.replicate(nn.Linear(4, 2), exact=True)
    for (x,) in samestep.loader(TensorDataset(torch.randn(6, 4)), 6):
        with pytest.raises(UsageError, match=r"take the training batches from samestep\.steps"):
            model(x)
    with torch.no_grad():
        model.eval()(torch.randn(2, 4))


def test_sync_batchnorm_and_exact_exclude_each_other(world):
    with pytest.raises(UsageError, match="drop sync_batchnorm"):
        samestep.replicate(nn.BatchNorm1d(3), exact=True, sync_batchnorm=True)


def test_an_operation_without_a_deterministic_kernel_is_named(world):
    samestep.replicate(nn.Linear(1, 1), exact=True)
    with pytest.raises(RuntimeError, match="put_"):
        torch.zeros(3).put_(torch.tensor([0]), torch.tensor([1.0]), accumulate=False)


def test_two_backward_passes_through_a_microbatch_add_up(world):
    torch.manual_seed(0)
    rows, plain = torch.randn(14, 4).double(), nn.Linear(4, 2).double()
    model = samestep.replicate(copy.deepcopy(plain), exact=True)
    for step in samestep.steps(TensorDataset(rows), 14, microbatch=2):
        for (x,) in step:
            made = model(x)
            made.mean().backward(retain_graph=True)
            made.square().mean().backward()
            model(2 * x).mean().backward()
    made = plain(rows)
    (made.mean() + made.square().mean() + plain(2 * rows).mean()).backward()
    assert torch.allclose(model.weight.grad, plain.weight.grad)


class Following(nn.Linear):
    def __init__(self):
        super().__init__(4, 2)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.mean = 0.5 * self.mean + 0.5 * x.mean(0)
        return super().forward(x - self.mean)


def test_a_buffer_that_forward_assigns_moves_by_the_mean_over_the_microbatches(world):
    torch.manual_seed(0)
    rows, model = torch.randn(14, 4), samestep.replicate(Following(), exact=True)
    held, expected = model.mean, torch.zeros(4)
    for step, x in zip(samestep.steps(TensorDataset(rows), 6, microbatch=2), rows.split(6), strict=True):
        for (part,) in step:
            assert torch.allclose(model.mean, expected)
            model(part).sum().backward()
        expected = 0.5 * expected + 0.5 * x.mean(0)
        assert torch.allclose(model.mean, expected)
        assert model.mean is held


class Laid(nn.Module):
    """Parameters that are complex, transposed, channels last, and a part of a larger tensor."""

    def __init__(self):
        super().__init__()
        self.plain = nn.Parameter(torch.rand(2, 3, dtype=torch.complex128))
        self.transposed = nn.Parameter(torch.rand(3, 2, dtype=torch.complex128).t())
        self.part = nn.Parameter(torch.rand(3, 5, dtype=torch.float64)[:, :2].t())
        self.last = nn.Conv2d(2, 3, 2).double().to(memory_format=torch.channels_last)

    def forward(self, x):
        turned = (self.plain * self.transposed * (2j + x) * self.part).imag.sum()
        return turned + self.last(x.view(1, 2, 1, 3).expand(1, 2, 2, 3)).square().sum()


def test_gradients_are_the_serial_ones_whatever_the_parameters_kind_and_strides(world):
    torch.manual_seed(0)
    rows, plain, model = torch.rand(12, 2, 3, dtype=torch.float64), Laid(), Laid()
    model.load_state_dict(plain.state_dict())
    samestep.replicate(model, exact=True)
    for step in samestep.steps(TensorDataset(rows), 12, microbatch=1):
        for (x,) in step:
            model(x[0]).square().backward()
    (sum(plain(x).square() for x in rows) / 12).backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.always, self.sometimes, self.never = (nn.Linear(4, 4).double() for _ in range(3))

    def forward(self, x):
        return (self.sometimes if x[0, 0] > 0 else nn.Identity())(self.always(x))


@pytest.mark.parametrize("positive", range(7))
def test_unused_parameters_have_the_gradient_of_the_serial_script_or_none(world, positive):
    """In a step whose one microbatch takes the branch, or none does, whoever computes it."""
    torch.manual_seed(0)
    rows = torch.rand(7, 4, dtype=torch.float64)
    rows[:, 0] *= torch.where(torch.arange(7) == positive, 1, -1)
    plain, model = Branching(), Branching()
    model.load_state_dict(plain.state_dict())
    samestep.replicate(model, exact=True, find_unused_parameters=True)
    adams = [torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.5) for net in (plain, model)]
    for step, x in zip(samestep.steps(TensorDataset(rows), 6, microbatch=1), rows.split(6), strict=True):
        for (part,) in step:
            model(part).square().sum().backward()
        (sum(plain(row[None]).square().sum() for row in x) / len(x)).backward()
        for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None), name
            assert mine.grad is None or torch.allclose(mine.grad, theirs.grad), name
        for adam in adams:
            adam.step()
            adam.zero_grad()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
        assert all(torch.equal(value, mine) for value in samestep.gather(mine.detach()[None]))


class Unwritten(nn.Linear):
    """Reads memory that nobody wrote, in the step in which it is told to."""

    reads = False

    def forward(self, x):
        return super().forward(x) + (torch.empty(1).sum() if self.reads else 0)


def test_memory_that_is_read_unwritten_is_nan_in_the_first_step_and_not_filled_after_it(world):
    from torch.utils import deterministic

    model = samestep.replicate(Unwritten(4, 2), exact=True)
    model.reads, filled = True, []
    # as when a process starts; an earlier test has taken this one's first step
    deterministic.fill_uninitialized_memory = True
    for step in samestep.steps(TensorDataset(torch.randn(12, 4)), 6, microbatch=2):
        filled.append(deterministic.fill_uninitialized_memory)
        for (x,) in step:
            loss = model(x).sum()
            assert loss.isnan() == filled[-1]
            loss.backward()
        model.reads = False
    assert filled == [True, False]
    assert deterministic.fill_uninitialized_memory is False


def test_a_workspace_that_does_not_give_equal_bits_is_replaced(world):
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":0:0"
    assert samestep.replicate(nn.Linear(4, 2), exact=True).weight.shape == (2, 4)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


class Counted(TorchDispatchMode):
    """Launches on a GPU: an operation that computes or copies, or each tensor of a list with several types."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        alias = func._schema.returns[0].alias_info if func._schema.returns else None
        if func.namespace == "aten" and (alias is None or alias.is_write):
            kinds = [
                (len(tensors), {getattr(each, "dtype", None) for each in tensors})
                for tensors in args
                if type(tensors) is list
            ]
            self.count += max((length for length, types in kinds if len(types) > 1), default=1)
        return func(*args, **(kwargs or {}))


@pytest.mark.sizes(1, 2)
def test_what_a_microbatch_adds_to_its_sums_takes_as_many_operations_for_many_layers_as_for_few(world):
    """A launch for each of 161 parameters would take longer than what it adds."""
    counts = []
    for layers in (2, 20):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(layers)))
        samestep.replicate(model, exact=True)
        tree = model.forward.tree
        for step in samestep.steps(TensorDataset(torch.randn(32, 4)), 32, microbatch=4):
            for at, (x,) in enumerate(step):
                model(x).sum().backward()
                if at == 1:
                    with Counted() as counted:
                        share = joined().the(Spine).origins.trained
                        tree.microbatch_ends(share)
                    counts.append(counted.count)
                    break
            break
        del model
    assert counts[1] == counts[0] < 10, counts
