"""How a loss was reduced is read from its graph, behind what changes no more than its scale or shape."""

import pytest
import torch
import torch.nn.functional as F

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
def test_a_mean_or_a_sum_and_what_it_is_divided_by(loss, reduction, count):
    found = reduction_of(loss)
    assert (found["reduction"], found["count"]) == (reduction, count)
    assert found["terms"] == (24 if reduction == "mean" else count)


@pytest.mark.parametrize(
    "loss",
    [
        X.max(),
        X.norm(),
        X[0, 0].exp() * X.mean(),
        X.sum() / X.square().sum(),
        torch.tensor(1.0),
        X,
        X.mean().sqrt() * 2,
    ],
    ids=["max", "norm", "a learned weight", "a quotient", "constant", "leaf", "a root"],
)
def test_of_another_loss_nothing_is_said(loss):
    assert reduction_of(loss) == {"reduction": None}
