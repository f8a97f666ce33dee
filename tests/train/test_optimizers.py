"""Steps that take gradients which the ranks have not exchanged."""

import copy
import io
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


def beside(model, x, tensor):
    return tensor.exp().sum() * model(x) - tensor.sum()


def as_input(model, x, tensor):
    return model(x + tensor)


def of_a_tensor_in_no_model(loader, make, mean, uses=beside):
    look_again()
    torch.manual_seed(3)
    model = nn.Linear(4, 1).double()
    early = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    optimizers = [torch.optim.Adam([*model.parameters(), early], lr=0.1)]
    model, tensors = make(model), [early]
    for step, (x, y) in enumerate(loader):
        if step == 5:  # saved and loaded, with an optimizer of its own
            saved = io.BytesIO()
            torch.save(early, saved)
            saved.seek(0)
            tensors.append(torch.load(saved))
            optimizers.append(torch.optim.Adam(tensors[1:], lr=0.1))
        for optimizer in optimizers:
            optimizer.zero_grad()
        F.mse_loss(uses(model, x, sum(tensors)), y).backward()
        for tensor in tensors:
            tensor.grad = mean(tensor.grad)
        for optimizer in optimizers:
            optimizer.step()
    return torch.stack(tensors).detach()


@pytest.mark.sizes(3)
def test_a_tensor_beside_the_model_whose_gradients_differ_is_refused_with_the_line_to_write(world):
    with pytest.raises(UsageError, match=r"t.grad = samestep.mean\(t.grad\) after backward"):
        of_a_tensor_in_no_model(samestep.loader(DATA, 7), samestep.replicate, lambda gradient: gradient)


@pytest.mark.parametrize("uses", [beside, as_input])
def test_the_mean_of_the_gradient_of_a_tensor_in_no_model_is_the_whole_batchs(world, uses):
    data = list(DATA) * 2
    found = of_a_tensor_in_no_model(samestep.loader(data, 7), samestep.replicate, samestep.mean, uses)
    serial = of_a_tensor_in_no_model(
        DataLoader(data, 7), lambda model: model, lambda gradient: gradient, uses
    )
    torch.testing.assert_close(found, serial, rtol=1e-9, atol=1e-9)


def test_what_torch_autograd_grad_gives_of_a_stepped_tensor_is_a_term_of_the_whole_batchs(world):
    look_again()
    plain = network()
    model = samestep.replicate(copy.deepcopy(plain))
    tensor = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([tensor], lr=0.1)
    for (x, y), (all_x, all_y) in zip(samestep.loader(DATA, 7), DataLoader(DATA, 7), strict=True):
        F.mse_loss(beside(model, x, tensor), y).backward()  # from here on its gradients are this rank's own
        (slope,) = torch.autograd.grad(F.mse_loss(beside(model, x, tensor), y), tensor)
        serial = torch.func.grad(lambda t, x=all_x, y=all_y: F.mse_loss(beside(plain, x, t), y))(
            tensor.detach()
        )
        torch.testing.assert_close(samestep.sum(slope), serial)
        optimizer.zero_grad()


def test_a_tensor_that_a_model_holds_later_is_exchanged_like_the_models(world):
    look_again()
    torch.manual_seed(3)
    first, second = samestep.replicate(nn.Linear(4, 1).double()), nn.Linear(4, 1).double()
    optimizer = torch.optim.SGD(second.parameters(), 0.1)
    gradients = []
    for step, (x, y) in enumerate(samestep.loader(DATA, 7)):
        if step == 1:
            samestep.replicate(second)
        F.mse_loss(first(x), y).backward()
        if step:
            F.mse_loss(second(x), y).backward()
            gradients.append(second.weight.grad.clone())
            optimizer.zero_grad()
    torch.manual_seed(3)
    _, serial = nn.Linear(4, 1).double(), nn.Linear(4, 1).double()
    for (x, y), gradient in zip(list(DataLoader(DATA, 7))[1:], gradients, strict=True):
        serial.zero_grad()
        F.mse_loss(serial(x), y).backward()
        torch.testing.assert_close(gradient, serial.weight.grad)
