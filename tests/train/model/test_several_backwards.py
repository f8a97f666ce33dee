"""Several backward passes in one batch add up to the gradients of the whole batch, as DDP alone does not."""

import warnings

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
    first, second = model(x), model(2 * x)
    first.mean().backward()
    second.square().mean().backward()


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
        self.first, self.second = made(), made()

    def forward(self, x):
        return self.first(x), self.second(x)


def test_a_parameter_that_only_one_rank_uses_in_the_second_backward_is_averaged(world):
    rows = torch.ones(6, 3).double()
    model = samestep.replicate(Two(), find_unused_parameters=True)
    for (x,) in samestep.loader(TensorDataset(rows), 6):
        first, second = model(x)
        first.mean().backward(retain_graph=True)
        (first.mean() + (second.mean() if world.rank == 0 else 0)).backward()
    serial = made()
    serial(rows).mean().backward()
    for mine, wanted in zip(model.second.parameters(), serial.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, wanted.grad / world.size)


def test_a_backward_of_one_output_calls_no_hook_of_the_other_also_without_a_share(world):
    model, called = samestep.replicate(Two()), []

    def hook(gradient):
        called.append(gradient is not None)
        return 2 * gradient

    for parameter in model.second.parameters():
        parameter.register_hook(hook)
    for (x,) in samestep.loader(TensorDataset(torch.ones(7, 3).double()), 6):
        first, second = model(x)
        first.mean().backward(retain_graph=True)
        assert not called
        assert all(parameter.grad is None for parameter in model.second.parameters())
        second.mean().backward()
        assert called == [True] * len(called) != []
        called.clear()
        model.zero_grad()


class Spare(nn.Module):
    """Of which some parts are used in some steps, and by some ranks."""

    def __init__(self):
        super().__init__()
        self.used, self.spare = made(), made()

    def forward(self, x, *, with_spare=False):
        return self.used(x) + (self.spare(x) if with_spare else 0)


def test_parameters_that_no_loss_reaches_keep_no_gradient_and_the_others_have_the_whole_batchs(world):
    draw = torch.Generator(torch.get_default_device()).manual_seed(1)
    rows = torch.rand(9, 3, generator=draw, dtype=torch.float64)
    serial, model = Spare(), samestep.replicate(Spare())
    ours, theirs = (torch.optim.Adam(net.parameters(), lr=0.1) for net in (model, serial))
    for step, (x,) in enumerate(samestep.loader(TensorDataset(rows), 4)):
        for net, optimizer, batch in ((model, ours, x), (serial, theirs, rows[4 * step : 4 * step + 4])):
            optimizer.zero_grad()
            net(batch, with_spare=step == 1).square().mean().backward()
            optimizer.step()
        assert {parameter.grad is None for parameter in model.spare.parameters()} == {step != 1}
        for mine, wanted in zip(model.parameters(), serial.parameters(), strict=True):
            torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=1e-14)


def test_a_parameter_that_only_one_rank_uses_is_averaged(world):
    rows = torch.ones(6, 3).double()
    model = samestep.replicate(Spare())
    for (x,) in samestep.loader(TensorDataset(rows), 6):
        model(x, with_spare=world.rank == 0).mean().backward()
    serial = made()
    serial(rows).mean().backward()
    for mine, wanted in zip(model.spare.parameters(), serial.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, wanted.grad / world.size)


def test_a_penalty_on_slopes_that_a_bias_has_no_part_in_steps_like_the_serial_script(world):
    """As StyleGAN's R1 step, after which the same model is frozen and called."""
    rows = torch.linspace(0, 1, 18, dtype=torch.float64).view(6, 3)
    results = []
    for net, given in ((made(), [rows]), (samestep.replicate(made()), None)):
        for batch in given or (x for (x,) in samestep.loader(TensorDataset(rows), 6)):
            x = batch.clone().requires_grad_()
            (slope,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns of the strides of a gradient of one row
                slope.square().sum(1).mean().backward()
            net.requires_grad_(False)
            net(x).mean().backward()
        results.append([parameter.grad for parameter in net.parameters()])
    torch.testing.assert_close(results[1], results[0], rtol=1e-12, atol=1e-14)


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


class Notes(nn.Linear):
    """Writes into the dict that it gets."""

    def forward(self, batch):
        batch["seen"] = True
        return super().forward(batch["x"])


def test_what_a_model_writes_into_its_input_is_there_after_the_call(world):
    model = samestep.replicate(Notes(3, 1).double(), loss="sum")
    for (x,) in samestep.loader(TensorDataset(torch.ones(7, 3).double()), 6):
        model(batch := {"x": x}).sum().backward()
        assert batch["seen"]
