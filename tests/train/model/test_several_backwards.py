"""Several backward passes in one batch add up to the gradients of the whole batch, as DDP alone does not."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import samestep
from samestep import RanksDiffer


def made():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def through_one_call(model, x):
    y = model(x)
    y.mean().backward(retain_graph=True)
    y.square().mean().backward()


def after_two_calls(model, x):
    one, other = model(x), model(2 * x)
    one.mean().backward()
    other.square().mean().backward()


def call_by_call(model, x):
    model(x).mean().backward()
    model(2 * x).square().mean().backward()


def with_a_penalty_of_its_own(model, x):
    model(x).mean().backward()
    model[0].weight.square().sum().backward()


def beside_a_gradient_that_is_looked_at(model, x):
    y = model(x)
    y.mean().backward(retain_graph=True)
    torch.autograd.grad(y.sum(), list(model.parameters()), retain_graph=True)
    y.square().mean().backward()


def with_another_head(model, x):
    inner = model(x)
    inner.mean().backward(retain_graph=True)
    (inner * x[:, :1]).mean().backward()


WAYS = [
    through_one_call,
    after_two_calls,
    call_by_call,
    with_a_penalty_of_its_own,
    beside_a_gradient_that_is_looked_at,
    with_another_head,
]


@pytest.mark.parametrize("way", WAYS, ids=[way.__name__ for way in WAYS])
@pytest.mark.parametrize("count", [7, 6], ids=["unequal shares", "equal shares"])
def test_gradients_of_several_backwards_are_those_of_the_whole_batch(world, way, count):
    draw = torch.Generator(torch.get_default_device()).manual_seed(1)
    rows = torch.rand(count, 3, generator=draw, dtype=torch.float64)
    serial, model = made(), samestep.replicate(made())
    way(serial, rows)
    for (x,) in samestep.loader(TensorDataset(rows), count):
        way(model, x)
    for mine, wanted in zip(model.parameters(), serial.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, wanted.grad, rtol=1e-12, atol=1e-14)


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = made(), made()

    def forward(self, x):
        return self.one(x), self.other(x)


def test_a_parameter_that_only_one_rank_uses_in_the_second_backward_is_averaged(world):
    rows = torch.ones(6, 3).double()
    model = samestep.replicate(Two(), find_unused_parameters=True)
    for (x,) in samestep.loader(TensorDataset(rows), 6):
        one, other = model(x)
        one.mean().backward(retain_graph=True)
        (one.mean() + (other.mean() if world.rank == 0 else 0)).backward()
    serial = made()
    serial(rows).mean().backward()
    for mine, wanted in zip(model.other.parameters(), serial.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, wanted.grad / world.size)


def train(model, steps, spoil):
    """Train with SGD; `spoil` is called before the optimizer, with the number of the step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, (x,) in enumerate(samestep.loader(TensorDataset(torch.ones(3 * steps, 3).double()), 3)):
        model(x).mean().backward()
        spoil(number)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.sizes(2, 3)
def test_weights_that_a_rank_changes_in_the_last_steps_of_a_short_run_are_found(world):
    """Far from the 200 steps after which replicas are compared."""
    model = samestep.replicate(made())

    def spoil(number):
        if world.rank == 1 and number == 2:
            model[0].weight.grad.mul_(2)

    with pytest.raises(RanksDiffer, match=r"came apart between steps \d+ and \d+: 0\.weight"):
        train(model, 3, spoil)
