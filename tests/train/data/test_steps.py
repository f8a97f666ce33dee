"""A step of microbatches is the step of their whole batch."""

from itertools import chain

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep
from samestep import UsageError
from samestep.train.data.share import order
from samestep.train.step import spine

SAMPLES = 26


def dataset():
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(SAMPLES, 5, generator=generator, dtype=torch.float64),
        torch.randint(0, 3, (SAMPLES,), generator=generator),
    )


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def in_steps(microbatch, epochs=2, zero=True, **options):
    model, norms = samestep.replicate(network(), **options), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train = samestep.steps(dataset(), 8, microbatch=microbatch, shuffle=True, seed=0)
    for _ in train.epochs(epochs):
        for step in train:
            for x, y in step:
                assert len(x) <= microbatch
                F.cross_entropy(model(x), y).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
            optimizer.step()
            optimizer.zero_grad(set_to_none=zero)
    return [parameter.detach().clone() for parameter in model.parameters()], norms


@pytest.mark.sizes(1, 2, 3)
def test_the_shares_of_the_microbatches_make_the_mean_of_a_step(world):
    train = samestep.steps(dataset(), 8, microbatch=3, shuffle=True, seed=0)
    model = samestep.replicate(network())
    x, y = dataset().tensors
    for step, rows in zip(train, order(SAMPLES, 0, 0, True).split(8), strict=True):
        mean = 0.0
        for inputs, labels in step:
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            mean += loss.item() * train.share
        with torch.no_grad():
            assert samestep.sum(mean) == pytest.approx(F.cross_entropy(model(x[rows]), y[rows]).item())


@pytest.mark.sizes(1, 2, 3)
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("microbatch", [1, 2])
def test_a_step_has_the_gradient_of_its_whole_batch(world, microbatch, exact):
    parameters, norms = in_steps(microbatch, exact=exact)
    # a world of one computes what the serial script would; it is cheap enough to do so on every rank
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = dataset().tensors
    expected = []
    for epoch in range(2):
        for rows in order(SAMPLES, 0, epoch, True).split(8):
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            expected.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(norms, expected, rtol=1e-9, atol=0)
    for mine, theirs in zip(parameters, model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs.detach(), rtol=1e-9, atol=1e-12)


class Guess(nn.Linear):
    def forward(self, x):
        return torch.distributions.Categorical(logits=super().forward(x), validate_args=False)


def two_networks():
    torch.manual_seed(0)
    return nn.Linear(5, 7).double(), Guess(7, 3).double()


def loss_past_the_outputs(models, x, y):
    encoder, guess = models
    penalty = sum(parameter.abs().sum() for model in models for parameter in model.parameters())
    return 0.1 * penalty - guess(encoder(x).tanh()).log_prob(y).mean()


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("microbatch", [1, 2])
def test_a_penalty_an_opaque_output_and_chained_models_have_the_serial_gradient(world, microbatch, exact):
    models, plain = two_networks(), two_networks()
    for model in models:
        samestep.replicate(model, exact=exact)
    train = samestep.steps(dataset(), 8, microbatch=microbatch, shuffle=True, seed=0)
    optimizers = [
        torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1, momentum=0.9)
        for first, second in (models, plain)
    ]
    for step, rows in zip(train, order(SAMPLES, 0, 0, True).split(8), strict=True):
        for x, y in step:
            loss = loss_past_the_outputs(models, x, y)
            (loss * float("nan") if spine().origins.at_hand.lent else loss).backward()
        x, y = dataset().tensors
        loss_past_the_outputs(plain, x[rows], y[rows]).backward()
        for model, other in zip(models, plain, strict=True):
            for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
                torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-6, atol=1e-12)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("exact", [False, True])
def test_a_penalty_after_the_microbatches_counts_as_it_is(world, exact):
    model = samestep.replicate(network(), exact=exact)
    found = []
    for step in samestep.steps(dataset(), 8, microbatch=2):
        for x, y in step:
            F.cross_entropy(model(x), y).backward()
        before = model[0].weight.grad.clone()
        model[0].weight.sum().backward()
        found.append(model[0].weight.grad - before)
        model.zero_grad()
    assert all(torch.allclose(gradient, torch.ones_like(gradient)) for gradient in found)


@pytest.mark.parametrize("exact", [False, True])
def test_backward_through_a_microbatch_that_was_left_is_a_sentence(world, exact):
    model = samestep.replicate(network(), exact=exact)
    for step in samestep.steps(dataset(), 8, microbatch=2, drop_last=True):
        losses = []
        for x, y in step:
            losses.append(F.cross_entropy(model(x), y))
            losses[-1].backward(retain_graph=True)
        with pytest.raises(
            UsageError, match=r"came after the loop had left.*inside the loop over the step's"
        ):
            losses[-1].backward()


def test_zeroed_gradients_are_as_good_as_none(world):
    for exact in (False, True):
        ours, _ = in_steps(2, exact=exact, zero=False)
        theirs, _ = in_steps(2, exact=exact, zero=True)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=0 if exact else 1e-12, atol=0)
    torch.use_deterministic_algorithms(False)


def test_every_microbatch_comes_once_and_to_one_rank(world):
    rows = TensorDataset(torch.arange(SAMPLES))
    steps = samestep.steps(rows, 8, microbatch=2, shuffle=True, seed=3)
    assert len(steps) == 4
    with torch.no_grad():
        for step, whole in zip(steps, order(SAMPLES, 3, 0, True).split(8), strict=True):
            mine = [x.tolist() for (x,) in step]
            assert len(mine) == len(step)
            assert list(chain(*samestep.gather(mine))) == whole.tolist()


def test_a_step_that_was_left_early_does_not_shift_the_next(world):
    rows = TensorDataset(torch.arange(24))
    seen = []
    with torch.no_grad():
        for number, step in enumerate(samestep.steps(rows, 12, microbatch=2)):
            for (x,) in step:
                seen.append(x.tolist())
                if number == 0:
                    break
    assert [12, 13] in samestep.gather(seen)


def test_a_step_is_iterated_once(world):
    with torch.no_grad():
        for step in samestep.steps(dataset(), 8, microbatch=2):
            list(step)
            with pytest.raises(UsageError, match="iterated already"):
                list(step)


def test_mean_after_the_microbatches_weighs_what_each_rank_had(world):
    values = torch.arange(16, dtype=torch.float64)
    found = []
    for step in samestep.steps(TensorDataset(values), 8, microbatch=2):
        with torch.no_grad():
            found.append(samestep.mean(torch.cat([x for (x,) in step]).mean()).item())
    assert found == pytest.approx(values.view(2, 8).mean(1).tolist())


@pytest.mark.parametrize(
    ("batch", "microbatch", "says"),
    [
        (8, 0, "microbatch 0 is not a part of batch_size 8"),
        (8, 9, "microbatch 9 is not a part of batch_size 8"),
        (8, "2", "microbatch '2' is not a part"),
        (8, True, "microbatch True is not a part"),
        (0, 1, "batch_size 0 is not a number of samples"),
    ],
)
def test_a_microbatch_that_cannot_be_is_a_sentence(world, batch, microbatch, says):
    with pytest.raises(UsageError, match=says):
        samestep.steps(dataset(), batch, microbatch=microbatch)


def test_numpys_whole_numbers_are_whole_numbers(world):
    steps = samestep.steps(dataset(), np.int64(8), microbatch=np.int32(2), seed=np.uint8(3))
    assert steps.state_dict() == samestep.steps(dataset(), 8, microbatch=2, seed=3).state_dict()


@pytest.mark.sizes(3)
def test_fewer_microbatches_than_ranks_is_a_sentence(world):
    with pytest.raises(UsageError, match=r"microbatches of 4 is 2, fewer than the 3 ranks.*use microbatch=2"):
        samestep.steps(dataset(), 8, microbatch=4)


def test_where_steps_are_is_said_in_samples(world):
    def taken(steps, upto):
        seen = []
        with torch.no_grad():
            for number, step in enumerate(steps):
                seen += [x.tolist() for (x,) in step]
                if number + 1 == upto:
                    break
        return sorted(chain(*samestep.gather(seen)))

    rows = TensorDataset(torch.arange(SAMPLES))
    for upto in range(1, 5):
        whole = samestep.steps(rows, 8, microbatch=2, shuffle=True, seed=0)
        taken(whole, upto)
        rest = samestep.steps(rows, 8, microbatch=2, shuffle=True, seed=0)
        rest.load_state_dict(whole.state_dict())
        assert taken(rest, 99) == sorted(order(SAMPLES, 0, 0, True)[8 * upto :].tolist())
