"""Steps that take gradients which the ranks have not exchanged."""

from contextlib import nullcontext, redirect_stderr
from io import StringIO

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from train.test_mistakes import DATA, look_again, network

import samestep
from samestep.errors import UsageError

SAID = "takes gradients of each rank's own share"


@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize("held", [0, 1, 2])
def test_a_step_whose_last_backward_was_inside_no_sync_is_said(world, held, monkeypatch):
    monkeypatch.setenv("SAMESTEP_CHECK_EVERY", "0")
    look_again()
    model = samestep.replicate(network())
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with redirect_stderr(StringIO()) as said:
        for x, y in samestep.loader(DATA, 6):
            for at in range(2):
                with samestep.no_sync(model) if at < held else nullcontext():
                    F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert said.getvalue().count(SAID) == (held == 2 and world.rank == 0)


@pytest.mark.sizes(2, 3)
def test_a_step_of_another_model_is_not_said(world):
    look_again()
    held, model = samestep.replicate(network()), samestep.replicate(network())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with redirect_stderr(StringIO()) as said:
        for x, y in samestep.loader(DATA, 6):
            with samestep.no_sync(held):
                F.mse_loss(held(x), y).backward()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert SAID not in said.getvalue()


@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize("is_inside", [False, True])
def test_a_step_before_the_last_microbatch_is_said(world, is_inside, monkeypatch):
    monkeypatch.setenv("SAMESTEP_CHECK_EVERY", "0")
    look_again()
    model = samestep.replicate(network())
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with redirect_stderr(StringIO()) as said:
        for step in samestep.steps(DATA, 12, microbatch=2, drop_last=True):
            for x, y in step:
                F.mse_loss(model(x), y).backward()
                if is_inside:
                    optimizer.step()
            optimizer.step()
            optimizer.zero_grad()
    assert said.getvalue().count(SAID) == (is_inside and world.rank == 0)


def of_a_tensor_beside_the_model(loader, make, mean):
    look_again()
    torch.manual_seed(3)
    model = make(nn.Linear(4, 1).double())
    scale = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([*model.parameters(), scale], lr=0.1)
    for x, y in loader:
        optimizer.zero_grad()
        (scale.exp().sum() * F.mse_loss(model(x), y) - scale.sum()).backward()
        scale.grad = mean(scale.grad)
        optimizer.step()
    return scale.detach()


def test_the_mean_of_a_gradient_beside_the_model_is_the_whole_batchs(world):
    loader = samestep.loader(DATA, 7)
    found = of_a_tensor_beside_the_model(loader, samestep.replicate, samestep.mean)
    serial = of_a_tensor_beside_the_model(DataLoader(DATA, 7), lambda model: model, lambda gradient: gradient)
    torch.testing.assert_close(found, serial, rtol=1e-9, atol=1e-9)


@pytest.mark.sizes(3)
def test_a_tensor_beside_the_model_whose_gradients_differ_is_refused_with_the_line_to_write(world):
    with pytest.raises(UsageError, match=r"t.grad = samestep.mean\(t.grad\) after backward"):
        of_a_tensor_beside_the_model(samestep.loader(DATA, 7), samestep.replicate, lambda gradient: gradient)
