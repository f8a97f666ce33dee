"""Mistakes that would train wrong numbers in silence are made right or said."""

import os
import sys
from contextlib import redirect_stderr
from io import StringIO

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep
from samestep import RanksDiffer, UsageError
from samestep.train.backward import Backward
from samestep.train.data.loader import _Begun
from samestep.train.draws import Draws
from samestep.train.group.world import joined
from samestep.train.step import Spine

GENERATOR = torch.Generator().manual_seed(0)
X = torch.rand(23, 4, dtype=torch.float64, generator=GENERATOR)
Y = torch.rand(23, 1, dtype=torch.float64, generator=GENERATOR)
DATA = TensorDataset(X, Y)
WEIGHTS = torch.ones(2, dtype=torch.float64, requires_grad=True)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def batches(size):
    return [(X[start : start + size], Y[start : start + size]) for start in range(0, 23, size)]


def look_again():
    group = joined()
    group._said.clear()
    backward = group.the(Backward)
    group.the(Draws).watching._seen.clear()
    backward._terms = 0.0
    backward._losses_to_look_at, backward._loose = 3, {}
    backward._count_of_weights, backward._weights, backward._is_followed = -1, bytes(8), False


@pytest.mark.sizes(2, 3)
def test_a_rank_that_left_an_epoch_early_is_found_at_the_next_message(world, monkeypatch):
    monkeypatch.setenv("SAMESTEP_CHECK_EVERY", "0")  # the comparison of replicas would find it first
    model = samestep.replicate(network())
    train = samestep.loader(DATA, 6, seed=1)
    taken = {0: 2, 1: 3} if world.rank == world.size - 1 else {0: 4, 1: 1}
    for epoch in range(2):
        for number, (x, y) in enumerate(train, 1):
            F.mse_loss(model(x), y).backward()
            if number == taken[epoch]:
                break
    # every rank took five steps, on other samples
    with pytest.raises(
        RanksDiffer,
        match=r"rank 0 came to samestep.sum \(test_mistakes.py:\d+\) at epoch 1, sample 6 of its training and "
        r"rank \d at epoch 1, sample 18; every rank has to take the same steps",
    ):
        samestep.sum(1)
    joined().the(Spine)._position = (0, 0, 0)


@pytest.mark.parametrize(
    ("loss", "is_said"),
    [
        (lambda out, y: F.mse_loss(out, y, reduction="sum"), True),
        (lambda out, y: ((out - y) ** 2).sum(), True),
        (lambda out, y: ((out - y) ** 2).sum() / 12, True),
        (lambda out, y: F.mse_loss(out, y), False),
        (lambda out, y: ((out - y) ** 2).sum() / len(y), False),
        (lambda out, y: F.mse_loss(out, y) + 0.1 * (out**2).sum(), True),
        (lambda out, y: sum(F.mse_loss(one, other) for one, other in zip(out, y, strict=True)), True),
        (lambda out, y: sum(map(F.mse_loss, out, y)) / len(y), False),
        (lambda out, y: F.mse_loss(out, y) + 0.1 * samestep.sum((out**2).sum()), False),
        (lambda out, y: WEIGHTS.square().sum() + F.mse_loss(out, y), False),
        (lambda out, y: (out.mean(0) - y.mean(0)).square().sum(), False),
        (lambda out, y: samestep.gather(out).var(0).sum(), False),
        (lambda out, y: (WEIGHTS * torch.stack([F.mse_loss(out, y), out.abs().mean()])).sum(), False),
        (lambda out, y: ((out - y) ** 2).sum() / 6, True),
        (lambda out, y: in_place(((out - y) ** 2).sum(), y), False),
        (lambda out, y: F.mse_loss(out, y, reduction="none"), True),
    ],
    ids=[
        *("reduction", "sum", "divided by the batch", "mean", "divided", "a mean and a sum", "sample by sample"),
        *("sample by sample, divided", "totalled", "a penalty", "features", "gathered", "weighted"),
        *("written out", "in place", "a vector"),
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
            (sum(one.square().sum() for one in model.parameters()) + model(x).mean()).backward()
    """
    assert run(source, 2, env={"TORCHELASTIC_RESTART_COUNT": "1"}) == ([0, 0], ["", ""])


def test_losses_are_looked_at_in_the_first_steps_only(world):
    look_again()
    model = samestep.replicate(network())
    for x, y in samestep.loader(DATA, 6):
        F.mse_loss(model(x), y).backward()
    assert joined().the(Backward)._losses_to_look_at == 0


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
            for one in model.parameters():
                one.requires_grad_(False)
            model(x.requires_grad_()).sum().backward()
    assert "a sum over samples" not in said.getvalue()


@pytest.mark.sizes(2, 3)
def test_a_model_that_was_never_replicated_is_named(world):
    look_again()
    samestep.replicate(nn.Linear(1, 1))
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batches = iter(samestep.loader(DATA, 6))
    x, y = next(batches)
    F.mse_loss(model(x), y).backward()
    with pytest.raises(UsageError, match=r"^SGD steps 0.weight of Sequential, which belongs to no replica"):
        optimizer.step()


@pytest.mark.sizes(2, 3)
def test_a_model_whose_gradients_the_script_makes_equal_itself_raises_no_alarm(world):
    look_again()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, y in samestep.loader(DATA, 6):
        F.mse_loss(model(x), y).backward()
        for one in model.parameters():
            one.grad = samestep.mean(one.grad)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize("equal_steps", [2, 3])
def test_a_model_that_was_never_replicated_is_looked_at_in_its_first_three_steps(world, equal_steps):
    look_again()
    samestep.replicate(nn.Linear(1, 1))
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batches = iter(samestep.loader(DATA, 3))
    for x, y in [next(batches) for _ in range(equal_steps)]:
        F.mse_loss(model(x), y).backward()
        for one in model.parameters():
            one.grad = samestep.mean(one.grad)
        optimizer.step()
        optimizer.zero_grad()
    F.mse_loss(model(x + world.rank), y).backward()
    if equal_steps == 2:
        with pytest.raises(UsageError, match="which belongs to no replica"):
            optimizer.step()
    else:
        optimizer.step()


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs_takes_the_serial_steps(world, search):
    look_again()

    def train(model, batches):
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=6, line_search_fn=search)
        for x, y in batches:

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), y)
                loss.backward()
                return loss

            optimizer.step(closure)
        return model

    serial = train(network(), batches(8))
    model = train(samestep.replicate(network()), samestep.loader(DATA, 8))
    for mine, theirs in zip(model.parameters(), serial.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-9)


def test_what_replicate_cannot_take_is_said(world):
    parallel = nn.DataParallel(network())
    for given, where in ((parallel, ""), (nn.Sequential(nn.Identity(), parallel), " as 1")):
        with pytest.raises(
            UsageError, match=f"nn.DataParallel{where}, which splits batches itself; write its .module"
        ):
            samestep.replicate(given)
    with pytest.raises(UsageError, match="loss='total', which is not a reduction; use 'mean' or 'sum'"):
        samestep.replicate(network(), loss="total")


class Remembering(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1).double()
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))
        self.register_buffer("fixed", torch.ones(4, dtype=torch.float64))

    def forward(self, x):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.layer(x - self.mean)


def test_a_buffer_that_each_rank_changes_from_its_own_share_is_named_once(world):
    model = samestep.replicate(Remembering())
    joined()._said.clear()
    with redirect_stderr(StringIO()) as said:
        for _ in range(2):
            for x, y in samestep.loader(DATA, 6):
                F.mse_loss(model(x), y).backward()
    text = "forward computes the buffer mean of Remembering from each rank's own share"
    assert said.getvalue().count(text) == (world.size > 1 and world.rank == 0)


def test_a_loader_made_anew_in_every_epoch_is_said_to_repeat_its_order(world):
    model = samestep.replicate(network())
    data = TensorDataset(X, Y)

    def repeated(*seeds):
        joined()._members.pop(_Begun, None)
        with redirect_stderr(StringIO()) as said:
            for seed in seeds:
                for x, y in samestep.loader(data, 6, shuffle=True, seed=seed):
                    F.mse_loss(model(x), y).backward()
        return said.getvalue().count("a second loader over the same data begins at epoch 0 with seed=3")

    assert repeated(1, 2, 3) == 0
    assert repeated(3, 3, 3) == (world.rank == 0)
    assert repeated(None, None, None) == 0
    once = samestep.loader(data, 6, shuffle=True, seed=3)
    joined()._members.pop(_Begun, None)
    with redirect_stderr(StringIO()) as said:
        for _ in range(3):
            for x, y in once:
                F.mse_loss(model(x), y).backward()
    assert "begins at epoch 0" not in said.getvalue()


@pytest.mark.sizes(2)
def test_a_collective_in_a_forked_child_is_named(world):
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            samestep.sum(1)
        except UsageError as error:
            os.write(write, str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert (
        f"was called in a child process of rank {world.rank}, which is not a rank"
        in os.read(read, 999).decode()
    )
    os.close(read)
    os.close(write)
    sys.stdout.flush()
