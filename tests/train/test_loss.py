"""How a loss was reduced is read from its graph, and gradients of sums are added."""

from contextlib import redirect_stderr
from io import StringIO

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep
from samestep.train.data import share
from samestep.train.loss import reduction_of

X = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
Y = X.detach() + 1


@pytest.mark.parametrize(
    ("loss", "reduction", "count"),
    [
        (X.mean(), "mean", 24),
        (-X.mean(), "mean", 24),
        (X.mean() + 1, "mean", 24),
        ((X.mean() * 2).mean(), "mean", 24),
        (X.mean() * 2, "mean", 24),
        (X[0, 0].exp() * X.mean(), "mean", 24),
        (X.mean().double().clone().view(1).squeeze(), "mean", 24),
        (F.mse_loss(X, Y), "mean", None),
        (X.sum(), "sum", None),
        (X.sum() * 0.5, "sum", None),
        (X.sum() / 24, "sum", 24),
        (X.sum() * 2 / torch.tensor(6.0), "sum", 6),
        (X.sum() / torch.ones(2), "sum", None),
        (F.mse_loss(X, Y, reduction="sum"), "sum", None),
        (F.mse_loss(X, Y, reduction="none").sum(), "sum", None),
        (torch.stack([X.mean(), Y.mean() + X.mean()]).sum(), "mean", 24),
        (torch.stack([X.sum(), X.sum()]).sum(), "sum", None),
        (torch.stack([X, X]).sum(), "sum", None),
    ],
    ids=str,
)
def test_a_loss_is_found_to_be_a_mean_or_a_sum_and_by_what_it_is_divided(loss, reduction, count):
    found = reduction_of(loss)
    assert (found["reduction"], found["count"]) == (reduction, count)
    assert found["terms"] == (24 if reduction == "mean" else count)


@pytest.mark.parametrize(
    "loss",
    [
        X.max(),
        X.norm(),
        X.mean() * X.sum(),
        X.sum() / X.square().sum(),
        torch.tensor(1.0),
        X,
        X.mean().sqrt() * 2,
    ],
    ids=["max", "norm", "a product", "a quotient", "constant", "leaf", "a root"],
)
def test_a_loss_that_is_no_mean_and_no_sum_has_no_reduction(loss):
    assert reduction_of(loss) == {"reduction": None}


@pytest.mark.parametrize(("factors", "reduction"), [(3, "mean"), (1000, None)])
def test_learned_factors_of_a_loss_are_passed_by_if_they_are_few(factors, reduction):
    loss = X.mean()
    for _ in range(factors):
        loss = X[0, 0].exp() * loss
    assert reduction_of(loss)["reduction"] == reduction


GENERATOR = torch.Generator().manual_seed(0)
ROWS = torch.rand(23, 4, dtype=torch.float64, generator=GENERATOR)
WANTED = torch.rand(23, 1, dtype=torch.float64, generator=GENERATOR)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()


@pytest.mark.parametrize("reduction", ["sum", "tokens"])
@pytest.mark.parametrize("batch_size", [6, 22])
def test_a_summed_loss_trains_as_in_the_serial_script(world, reduction, batch_size):
    """The last batch of 22 has one sample, fewer than there are ranks."""
    serial, model = network(), samestep.replicate(network(), loss="sum")
    for (x, y), (whole_x, whole_y) in zip(
        samestep.loader(TensorDataset(ROWS, WANTED), batch_size, shuffle=True, seed=2),
        [(ROWS[rows], WANTED[rows]) for rows in order(batch_size)],
        strict=True,
    ):
        if reduction == "sum":
            F.mse_loss(model(x), y, reduction="sum").backward()
            F.mse_loss(serial(whole_x), whole_y, reduction="sum").backward()
        else:
            keep, keep_whole = y > 0.4, whole_y > 0.4
            total = (F.mse_loss(model(x), y, reduction="none") * keep).sum()
            (total / samestep.sum(keep.sum().item())).backward()
            loss = (F.mse_loss(serial(whole_x), whole_y, reduction="none") * keep_whole).sum()
            (loss / keep_whole.sum()).backward()
        for mine, theirs in zip(model.parameters(), serial.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-10, atol=1e-13)
        for net in (model, serial):
            net.zero_grad()


def order(batch_size):
    return share.order(23, 2, 0, True).split(batch_size)


@pytest.mark.sizes(2)
def test_a_sum_times_one_over_its_count_is_no_sum_also_where_that_is_rounded(world):
    """1 / (1 / 49) is not 49."""
    model = samestep.replicate(network())
    with redirect_stderr(StringIO()) as said:
        for (x,) in samestep.loader(TensorDataset(ROWS.repeat(5, 1)[:98]), 98):
            (1 / len(x) * model(x).square().sum()).backward()
    assert not said.getvalue()


@pytest.mark.parametrize("exact", [False, True])
def test_a_summed_loss_over_microbatches_trains_as_in_the_serial_script(world, exact):
    serial, model = network(), samestep.replicate(network(), loss="sum", exact=exact)
    for step, rows in zip(
        samestep.steps(TensorDataset(ROWS, WANTED), 8, microbatch=2, shuffle=True, seed=2),
        order(8),
        strict=True,
    ):
        for x, y in step:
            F.mse_loss(model(x), y, reduction="sum").backward()
        F.mse_loss(serial(ROWS[rows]), WANTED[rows], reduction="sum").backward()
        for mine, theirs in zip(model.parameters(), serial.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-10, atol=1e-13)
        for net in (model, serial):
            net.zero_grad()
    torch.use_deterministic_algorithms(False)
