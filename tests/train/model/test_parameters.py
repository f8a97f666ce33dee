"""Parameters that a script freezes, unfreezes or adds while it trains are trained as in the serial script."""

import copy
from contextlib import redirect_stderr
from io import StringIO

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import samestep
from samestep import RanksDiffer, UsageError
from samestep.train.group.world import joined


def made():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def freeze(model):
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)


def unfreeze(model):
    for parameter in model[0].parameters():
        parameter.requires_grad_(True)


def add(model):
    torch.manual_seed(1)
    model.append(nn.Linear(1, 1).double())


def freeze_and_add(model):
    freeze(model)
    add(model)


def trained(model, steps, change, changes_at):
    """Two epochs of two steps; the model is changed before one of them, or at -1 after the first epoch."""
    number = 0
    for epoch in range(2):
        for step in steps():
            if number == changes_at:
                change(model)
            number += 1
            model.zero_grad()
            for (x,) in step:
                model(x).square().mean().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.1 * parameter.grad
        if epoch == 0 and changes_at == -1:
            change(model)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("change", [freeze, unfreeze, add, freeze_and_add])
def test_parameters_that_are_added_or_freed_are_trained_from_then_on_and_frozen_ones_not(
    world, change, exact
):
    draw = torch.Generator(torch.get_default_device()).manual_seed(1)
    data = TensorDataset(torch.rand(11, 3, generator=draw, dtype=torch.float64))
    model = made()
    if change is unfreeze:
        freeze(model)
    serial = copy.deepcopy(model)
    samestep.replicate(model, exact=exact)
    at = 1 if change in (freeze, unfreeze) else -1

    def shared():
        return samestep.steps(data, 6, microbatch=2) if exact else ([x] for x in samestep.loader(data, 6))

    trained(serial, lambda: ([x] for x in DataLoader(data, 6)), change, at)
    trained(model, shared, change, at)
    for mine, wanted in zip(model.parameters(), serial.parameters(), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.sizes(2, 3)
def test_a_discriminator_that_is_frozen_in_turns_is_wrapped_once(world):
    maker, judge = samestep.replicate(made()), samestep.replicate(nn.Linear(1, 1).double())
    wrapped = []
    for (x,) in samestep.loader(TensorDataset(torch.rand(12, 3).double()), 4):
        for trains in (True, False):
            judge.requires_grad_(trains)
            judge(maker(x).detach() if trains else maker(x)).mean().backward()
            wrapped.append(judge.forward.ddp)
    assert wrapped[0]
    assert all(ddp is wrapped[0] for ddp in wrapped)


@pytest.mark.sizes(2, 3)
def test_parameters_that_ranks_add_unlike_are_named(world):
    model = samestep.replicate(made())
    data = TensorDataset(torch.rand(6, 3).double())
    for (x,) in samestep.loader(data, 6):
        model(x).mean().backward()
    model.append(nn.Linear(1, 1 + (world.rank == 1)).double())
    with pytest.raises(
        RanksDiffer, match=r"replicate found 3\.weight float64\[1, 1\] on rank 0 and 3\.weight"
    ):
        next(iter(samestep.loader(data, 6)))


def test_lazy_parameters_are_refused_in_a_sentence(world):
    with pytest.raises(UsageError, match="lazy parameters, which have no shape yet; call the model with one"):
        samestep.replicate(nn.LazyLinear(3))


class Codebook(nn.Module):
    def __init__(self):
        super().__init__()
        self.code, self.layer = nn.Parameter(torch.zeros(3).double()), nn.Linear(3, 3).double()

    def forward(self, x):
        self.code = nn.Parameter(0.9 * self.code + 0.1 * x.sum(0))
        return self.layer(x - self.code.detach())


def test_a_parameter_that_forward_replaces_is_named_where_each_step_takes_a_new_iterator(world):
    model, data = samestep.replicate(Codebook()), TensorDataset(torch.rand(6, 3).double())
    joined()._said.clear()
    with redirect_stderr(StringIO()) as said:
        for _ in range(3):
            (x,) = next(iter(samestep.loader(data, 6)))
            model(x).square().mean().backward()
    assert said.getvalue().count("the parameter code of Codebook was replaced") == (
        world.rank == 0 < world.size - 1
    )
