"""A loss that ranks do not make as the serial script makes it is said, with what to write, and no other."""

from contextlib import redirect_stderr
from io import StringIO

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from train.test_mistakes import DATA, X, Y, look_again, network

import samestep
from samestep.train.backward import Backward
from samestep.train.group.world import joined

WEIGHTS = torch.ones(2, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize(
    ("loss", "is_said"),
    [
        (lambda out, y: F.mse_loss(out, y, reduction="sum"), True),
        (lambda out, y: ((out - y) ** 2).sum(), True),
        (lambda out, y: ((out - y) ** 2).sum() / 12, True),
        (lambda out, y: F.mse_loss(out, y), False),
        (lambda out, y: ((out - y) ** 2).sum() / len(y), False),
        (lambda out, y: F.mse_loss(out, y) + 0.1 * (out**2).sum(), True),
        (lambda out, y: sum(F.mse_loss(row, wanted) for row, wanted in zip(out, y, strict=True)), True),
        (lambda out, y: sum(map(F.mse_loss, out, y)) / len(y), False),
        (lambda out, y: F.mse_loss(out, y) + 0.1 * samestep.sum((out**2).sum()), False),
        (lambda out, y: WEIGHTS.square().sum() + F.mse_loss(out, y), False),
        (lambda out, y: (out.mean(0) - y.mean(0)).square().sum(), False),
        (lambda out, y: samestep.gather(out).var(0).sum(), False),
        (lambda out, y: (WEIGHTS * torch.stack([F.mse_loss(out, y), out.abs().mean()])).sum(), False),
        (lambda out, y: ((out - y) ** 2).sum() / 6, True),
        (lambda out, y: in_place(((out - y) ** 2).sum(), y), False),
        (lambda out, y: F.mse_loss(out, y, reduction="none"), True),
        (lambda out, y: by_numel(out, y), False),
        (lambda out, y: (out.expand(-1, 2) - y).square().sum() / (len(y) * 2), False),
        (lambda out, y: F.mse_loss(out, y) + 6 * (1 / len(y)) * F.mse_loss(out, y, reduction="sum"), False),
        (lambda out, y: F.mse_loss(out, y) * len(y), True),
        (lambda out, y: F.mse_loss(out, y, reduction="sum") / samestep.sum(len(y)), True),
        (lambda out, y: -sum(out[i, 0] * y[i, 0] for i in range(len(y))) / 12, True),
        (lambda out, y: sum(out[i, 0] * y[i, 0] for i in range(len(y))) / len(y) + WEIGHTS.sum(), False),
        (lambda out, y: added_up(out, y), False),
    ],
    ids=[
        *("reduction", "sum", "divided by the batch", "mean", "divided", "a mean and a sum", "sample by sample"),
        *("sample by sample, divided", "totalled", "a penalty", "features", "gathered", "weighted"),
        *("written out", "in place", "a vector", "by numel", "two for each", "weighed and divided"),
        *("times len", "divided by all samples", "row by row", "row by row, divided", "row by row, in place"),
    ],
)  # fmt: skip
def test_a_sum_over_samples_is_said_once(world, loss, is_said):
    look_again()
    model = samestep.replicate(network())
    with redirect_stderr(StringIO()) as said:
        for x, y in samestep.loader(DATA, 12):
            made = loss(model(x), y)
            made.backward(torch.ones_like(made))
    text = f"has a sum over samples, and the gradients of ranks are averaged: it trains with 1/{world.size}"
    assert said.getvalue().count(text) == (is_said and world.size > 1 and world.rank == 0)


def by_numel(out, y):
    """At 2 ranks a share has as many numbers as the batch has samples."""
    two = y.expand(-1, 2)
    return F.mse_loss(out.expand(-1, 2), two, reduction="sum") / two.numel()


def added_up(out, y):
    """The mean over the rows, and a penalty that the rows have no part in."""
    loss = n = 0
    for row, wanted in zip(out, y, strict=True):
        loss -= row[0] * wanted[0]
        n += 1
    return loss / n + WEIGHTS.square().sum()


def in_place(loss, y):
    loss /= len(y)
    return loss


@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize(
    ("loss", "mode", "said"),
    [
        (
            lambda out, y, n: F.mse_loss(out, y) / len(y),
            "mean",
            "divides an average by the number of samples",
        ),
        (
            lambda out, y, n: in_place(F.mse_loss(out, y), y),
            "mean",
            "divides an average by the number of samples",
        ),
        (lambda out, y, n: F.mse_loss(out, y) / n, "mean", ""),
        (lambda out, y, n: F.mse_loss(out, y), "sum", "has a mean over this rank's samples"),
        (lambda out, y, n: ((out - y) ** 2).sum() / y.shape[0], "sum", "has a mean over this rank's samples"),
        (lambda out, y, n: F.mse_loss(out, y) * len(y) / samestep.sum(len(y)), "sum", ""),
        (lambda out, y, n: ((out - y) ** 2).mean(1).sum() / samestep.sum(len(y)), "sum", ""),
    ],
    ids=["len", "in place", "as many by chance", "a mean", "its own count", "weighed", "rows' means"],
)
def test_a_loss_divided_by_the_shares_count_or_a_mean_where_gradients_are_added_is_said(
    world, loss, mode, said
):
    look_again()
    model = samestep.replicate(network(), loss=mode)
    with redirect_stderr(StringIO()) as found:
        for x, y in samestep.loader(DATA, 12):
            loss(model(x), y, 12 // world.size).backward()
    assert found.getvalue().count(said or "samestep:") == bool(said and world.rank == 0), found.getvalue()


@pytest.mark.sizes(2)
def test_a_mean_is_said_of_the_model_whose_ranks_are_added_only(world):
    look_again()
    added, averaged = samestep.replicate(network(), loss="sum"), samestep.replicate(network())
    with redirect_stderr(StringIO()) as found:
        for x, y in samestep.loader(DATA, 12):
            F.mse_loss(averaged(x), y).backward()
            F.mse_loss(added(x), y, reduction="sum").backward()
    assert found.getvalue() == ""
    with redirect_stderr(StringIO()) as found:
        for x, y in samestep.loader(DATA, 12):
            F.mse_loss(added(x), y).backward()
    assert found.getvalue().count("has a mean over this rank's samples") == (world.rank == 0)


def test_a_penalty_that_stands_first_is_no_sum_after_a_restart(run):
    source = """
        for (x,) in train:
            (sum(parameter.square().sum() for parameter in model.parameters()) + model(x).mean()).backward()
    """
    assert run(source, 2, env={"TORCHELASTIC_RESTART_COUNT": "1"}) == ([0, 0], ["", ""])


def test_losses_are_looked_at_in_the_first_steps_only(world):
    look_again()
    model = samestep.replicate(network())
    for x, y in samestep.loader(DATA, 6):
        F.mse_loss(model(x), y).backward()
    assert joined().the(Backward)._first_losses._losses_to_look_at == 0


@pytest.mark.parametrize("is_averaged", [False, True])
def test_a_root_of_the_mean_of_a_share_is_said(world, is_averaged):
    look_again()
    model = samestep.replicate(network())
    with redirect_stderr(StringIO()) as said:
        for x, y in samestep.loader(DATA, 6):
            loss = F.mse_loss(model(x), y)
            (samestep.mean(loss) if is_averaged else loss).sqrt().backward()
    is_said = world.size > 1 and world.rank == 0 and not is_averaged
    assert said.getvalue().count("computes with averages over the samples of a batch") == is_said


class Smooth(nn.Module):
    """Its forward derives its weights from a part of the samples that it is called with, or from all."""

    def __init__(self, count):
        super().__init__()
        self.net, self.count = network(), count

    def forward(self, x, y):
        loss = F.mse_loss(self.net(x)[: self.count], y[: self.count])
        torch.autograd.grad(loss, [*self.net.parameters()], create_graph=True)
        return loss


@pytest.mark.sizes(2)
@pytest.mark.parametrize("count", [2, None])
def test_weights_that_forward_derives_from_all_of_its_samples_are_said(world, count):
    look_again()
    model = samestep.replicate(Smooth(count))
    with redirect_stderr(StringIO()) as said:
        for x, y in samestep.loader(DATA, 6, drop_last=True):
            model(x, y).backward()
    is_said = count is None and world.rank == 0
    assert said.getvalue().count("derives weights inside a model's forward") == is_said


@pytest.mark.parametrize("is_averaged", [False, True])
def test_weights_that_the_loop_updates_by_hand_and_no_replica_holds_are_said(world, is_averaged):
    look_again()
    weight = torch.zeros(4, 1, dtype=torch.float64, requires_grad=True)
    with redirect_stderr(StringIO()) as said:
        for x, y in samestep.loader(DATA, 6):
            x.requires_grad_()
            ((x @ weight - y) ** 2).mean().backward()
            with torch.no_grad():
                weight -= 0.1 * (samestep.mean(weight.grad) if is_averaged else weight.grad)
            weight.grad = None
    text = "trains a tensor of shape [4, 1] that belongs to no replica"
    assert said.getvalue().count(text) == (world.size > 1 and world.rank == 0 and not is_averaged)


@pytest.mark.parametrize("ignored", [0, 5], ids=["none ignored", "some ignored"])
def test_a_mean_over_unlike_numbers_of_terms_is_said(world, ignored):
    look_again()
    labels = torch.arange(23) % 2
    labels[:ignored] = -100
    model = samestep.replicate(nn.Linear(4, 2).double())
    with redirect_stderr(StringIO()) as said:
        for x, y in samestep.loader(TensorDataset(X, labels), 23):
            F.cross_entropy(model(x), y).backward()
            samestep.mean(0.0)
            F.cross_entropy(samestep.gather(model(x)), samestep.gather(y)).backward()
            samestep.mean(0.0)
    is_said = ignored and world.size > 1 and world.rank == 0
    assert said.getvalue().count("unlike numbers of them for each of their samples") == is_said


class WithLoss(nn.Module):
    def __init__(self, is_first):
        super().__init__()
        self.layer, self.is_first = nn.Linear(4, 2).double(), is_first

    def forward(self, x, y):
        out = self.layer(x)
        loss = F.cross_entropy(out, y)
        return (loss, out) if self.is_first else (out, loss)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_loss_that_forward_returns_is_looked_at_where_shares_are_unlike(world, is_first):
    look_again()
    labels = torch.arange(23) % 2
    labels[:5] = -100
    model = samestep.replicate(WithLoss(is_first))
    with redirect_stderr(StringIO()) as said:
        for x, y in samestep.loader(TensorDataset(X, labels), 23):
            model(x, y)[0 if is_first else 1].backward()
            samestep.mean(0.0)
    is_said = world.size > 1 and world.rank == 0
    assert said.getvalue().count("unlike numbers of them for each of their samples") == is_said


def by_class(losses, y):
    return torch.stack([losses[y == label].mean() for label in (0, 1)]).mean()


@pytest.mark.sizes(2)
@pytest.mark.parametrize(
    ("loss", "is_said"),
    [
        (lambda out, y: F.cross_entropy(out, y) + out[y == 0].square().mean(), True),
        (
            lambda out, y: (
                F.cross_entropy(out, y) + 0.1 * (F.cross_entropy(out[y == 0], y[y == 0]) + out.mean())
            ),
            True,
        ),
        (lambda out, y: F.cross_entropy(out, y) + by_class(out.square().sum(1), y), True),
        (
            lambda out, y: (
                F.cross_entropy(out, y) + out.square().mean() + out[:, y.new_tensor([0, 0, 1])].mean()
            ),
            False,
        ),
        (lambda out, y: sum(row[: 1 + at % 2].mean() for at, row in enumerate(out)) / len(y), False),
        (lambda out, y: torch.stack([row[: 1 + at % 2].mean() for at, row in enumerate(out)]).mean(), False),
        (lambda out, y: samestep.gather(out).mean() + F.cross_entropy(out, y), False),
        (
            lambda out, y: (
                WEIGHTS[0].exp() * F.cross_entropy(out, y, WEIGHTS.detach() + Y[:2, 0]) + WEIGHTS.sum()
            ),
            True,
        ),
        (lambda out, y: WEIGHTS[0].exp() * F.cross_entropy(out, y) + WEIGHTS.sum(), False),
    ],
    ids=[
        "masked",
        "nested",
        "by class",
        "all samples",
        "sample by sample",
        "stacked samples",
        "of all ranks",
        "learned factor and class weights",
        "learned factor",
    ],
)
def test_a_mean_over_unlike_numbers_of_terms_is_said_where_a_loss_is_a_sum_of_several(world, loss, is_said):
    look_again()
    labels = ((torch.arange(23) % 3 > 0) & (torch.arange(23) > 5)).long()
    model = samestep.replicate(nn.Linear(4, 2).double())
    with redirect_stderr(StringIO()) as said:
        for x, y in samestep.loader(TensorDataset(X, labels), 23):
            loss(model(x), y).backward()
            samestep.mean(0.0)
    assert said.getvalue().count("unlike numbers of them for each") == (is_said and world.rank == 0)


@pytest.mark.sizes(2)
@pytest.mark.parametrize(("ignored", "is_said"), [(0, True), (-100, False)])
def test_unlike_numbers_of_terms_are_said_of_a_mean_of_three_means_over_four_samples(world, ignored, is_said):
    look_again()
    model = samestep.replicate(nn.Linear(4, 3).double())
    with redirect_stderr(StringIO()) as said:
        for x, y in samestep.loader(TensorDataset(X[:8], torch.arange(8) // 3), 8):
            out = model(x)
            loss = (
                F.cross_entropy(out, y) + out.square().mean() + F.cross_entropy(out, y, ignore_index=ignored)
            )
            (loss / 3).backward()
            samestep.mean(0.0)
    assert said.getvalue().count("unlike numbers of them for each") == (is_said and world.rank == 0)


@pytest.mark.sizes(3)
def test_half_of_two_losses_over_the_gathered_batch_is_no_mean_over_unlike_terms(world):
    """Of eight samples the last rank has two, by which number the loss is divided too."""
    look_again()
    model = samestep.replicate(network())
    with redirect_stderr(StringIO()) as said:
        for x, y in samestep.loader(TensorDataset(X[:16], Y[:16]), 8):
            out, target = samestep.gather(model(x)), samestep.gather(y)
            ((F.mse_loss(out, target) + F.l1_loss(out, target)) / 2).backward()
            samestep.mean(0.0)
    assert "unlike numbers" not in said.getvalue()


@pytest.mark.sizes(2)
def test_sums_of_weights_that_are_equal_on_ranks_by_chance_hide_no_others(world):
    """In the first two batches of four, the weights of each rank's two samples add up to the batch's four."""
    look_again()
    weights = torch.tensor([1.0, 3.0, 2.0, 2.0, 2.0, 2.0, 3.0, 1.0, 1.0, 2.0, 3.0, 3.0]).double()
    model = samestep.replicate(network())
    with redirect_stderr(StringIO()) as said:
        for x, w in samestep.loader(TensorDataset(X[:12], weights), 4):
            losses = model(x).square()[:, 0]
            ((losses * w).sum() / w.sum()).backward()
        samestep.mean(0.0)
    assert said.getvalue().count("unlike numbers of them for each of their samples") == (not world.rank)


def test_a_mean_of_the_share_and_a_mean_of_all_samples_in_turn_have_no_unlike_terms(world):
    """As of a generator and a discriminator that gets all samples; the ranks compare their terms between the two."""
    look_again()
    model = samestep.replicate(network())
    with redirect_stderr(StringIO()) as said:
        for x, _ in samestep.loader(DATA, 7):
            model(x).square().mean().backward()
            model(samestep.gather(x)).square().mean().backward()
    assert "unlike numbers" not in said.getvalue()


def test_a_mean_over_one_of_two_batches_that_are_iterated_together_is_no_mean_over_unlike_terms(world):
    look_again()
    model = samestep.replicate(network())
    with redirect_stderr(StringIO()) as said:
        for (x, y), (other, _) in zip(samestep.loader(DATA, 7), samestep.loader(DATA, 10), strict=False):
            (F.mse_loss(model(x), y) + model(other).square().mean()).backward()
            samestep.mean(0.0)
    assert "unlike numbers" not in said.getvalue()


def test_a_slope_of_the_inputs_of_frozen_models_is_no_sum_to_be_said(world):
    look_again()
    model = samestep.replicate(network())
    with redirect_stderr(StringIO()) as said:
        for x, _ in samestep.loader(DATA, 6):
            for parameter in model.parameters():
                parameter.requires_grad_(False)
            model(x.requires_grad_()).sum().backward()
    assert "a sum over samples" not in said.getvalue()


def test_a_mean_of_a_batch_that_was_taken_before_the_loop_has_the_gradient_of_the_whole_batch(world):
    rows = torch.arange(8.0, dtype=torch.float64)[:, None]
    model = samestep.replicate(torch.nn.Linear(1, 1, bias=False).double())
    (x,) = next(iter(samestep.loader(TensorDataset(rows), 8)))
    for _ in range(2):
        model.zero_grad()
        samestep.mean(model(x).mean()).backward()
        assert model.weight.grad.item() == pytest.approx(3.5)
