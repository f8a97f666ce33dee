"""Every step's loss and the final weights are the serial script's, at any number of processes."""

import copy
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import Subset, TensorDataset

import samestep
from samestep.train.data import share

pytestmark = pytest.mark.sizes(1, 2, 3, 5)
PRECISION = 1e-6


def data(length):
    draw = torch.Generator(torch.get_default_device()).manual_seed(7)
    images = torch.rand(length, 2, 5, 5, generator=draw, dtype=torch.float64)
    return TensorDataset(images, torch.randint(0, 3, (length,), generator=draw))


def network(norm=False, seed=0):
    torch.manual_seed(seed)
    layers = [nn.Conv2d(2, 4, 3), *([nn.BatchNorm2d(4)] if norm else []), nn.ReLU(), nn.Flatten()]
    head = [nn.Linear(36, 8), *([nn.BatchNorm1d(8)] if norm else []), nn.Tanh(), nn.Linear(8, 3)]
    return nn.Sequential(*layers, *head).double()


def batches(length, batch_size, epochs, seed=0):
    """The serial script's batches."""
    images, labels = data(length).tensors
    for epoch in range(epochs):
        order = share.order(length, seed, epoch, True)
        for at in range(0, length, batch_size):
            yield images[order[at : at + batch_size]], labels[order[at : at + batch_size]]


def close(value, expected):
    assert value.shape == expected.shape
    assert torch.allclose(value.double(), expected.double(), rtol=PRECISION, atol=1e-12)


def all_close(model, plain):
    for (name, value), (plain_name, expected) in zip(
        model.state_dict().items(), plain.state_dict().items(), strict=True
    ):
        assert name == plain_name
        close(value, expected)


def optimizer_of(model, kind="momentum"):
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if kind == "adamw":
        return torch.optim.AdamW(trained, lr=0.01, weight_decay=0.1)
    return torch.optim.SGD(trained, lr=0.1, momentum=0.9)


def serial(model, length, batch_size, *, kind="momentum", clip=None, epochs=2):
    optimizer = optimizer_of(model, kind)
    losses = []
    for x, y in batches(length, batch_size, epochs):
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return losses


def shared(model, length, batch_size, *, kind="momentum", clip=None, epochs=2, in_memory=True, **options):
    dataset = data(length) if in_memory else Subset(data(length), range(length))
    extra = {} if in_memory else {"num_workers": 0}
    loader = samestep.loader(dataset, batch_size, shuffle=True, seed=0, **extra)
    model = samestep.replicate(model, **options)
    optimizer = optimizer_of(model, kind)
    losses = []
    for _ in loader.epochs(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            losses.append(samestep.mean(loss.detach()).item())
    return losses


# 23 = 3 * 7 + 2 and 22 = 3 * 7 + 1: the last batch is smaller than a world of three.
@pytest.mark.parametrize("length", [26, 23, 22])
@pytest.mark.parametrize("norm", [False, True])
def test_every_loss_and_the_final_weights_are_the_serial_ones(world, norm, length):
    if norm and length == 22:
        length = 25  # a batch of one has no statistics, in a serial script either
    model, plain = network(norm), network(norm)
    expected = serial(plain, length, 7)
    losses = shared(model, length, 7, sync_batchnorm=norm)
    assert losses == pytest.approx(expected, rel=PRECISION)
    all_close(model, plain)


def test_clipping_and_weight_decay_see_the_whole_batchs_gradient(world):
    model, plain = network(), network()
    expected = serial(plain, 23, 7, kind="adamw", clip=0.1)
    losses = shared(model, 23, 7, kind="adamw", clip=0.1, in_memory=False)
    assert losses == pytest.approx(expected, rel=PRECISION)
    all_close(model, plain)


@pytest.mark.parametrize(
    "options",
    [
        {"find_unused_parameters": True},
        {"bucket_cap_mb": 1},
        {"static_graph": True},
        {"gradient_as_bucket_view": False},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_of_ddp_are_passed_on_and_leave_the_numbers(world, options):
    model, plain = network(), network()
    expected = serial(plain, 23, 7)
    losses = shared(model, 23, 7, **options)
    assert losses == pytest.approx(expected, rel=PRECISION)
    all_close(model, plain)


def test_gradients_of_several_batches_are_accumulated_without_exchange_and_exactly(world):
    model, plain = network(), network()
    for net, replicated in ((plain, False), (model, True)):
        optimizer = optimizer_of(net)
        if replicated:
            net = samestep.replicate(net)
            stream = iter(samestep.loader(data(23), 6, shuffle=True, seed=0))
        else:
            stream = batches(23, 6, 1)
        for step, (x, y) in enumerate(stream):
            with samestep.no_sync(net, enabled=step % 2 == 0) if replicated else nullcontext():
                (cross_entropy(net(x), y) / 2).backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
    all_close(model, plain)


def test_two_models_in_one_backward_and_one_used_twice_train_as_in_the_serial_script(world):
    def train(encoder, decoder, stream):
        optimizer = torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], lr=0.1, momentum=0.9)
        for x, _ in stream:
            optimizer.zero_grad()
            code = encoder(x)
            mse_loss(decoder(code), x.flatten(1)).backward()
            optimizer.step()

    plain = network(), nn.Linear(3, 50).double()
    models = copy.deepcopy(plain)
    train(*plain, batches(23, 7, 1))
    train(*map(samestep.replicate, models), samestep.loader(data(23), 7, shuffle=True, seed=0))
    for model, original in zip(models, plain, strict=True):
        all_close(model, original)


def test_a_penalty_on_gradients_is_that_of_the_whole_batch(world):
    """As critics are held smooth: derived twice, through a second model, and from what depends on its output."""

    def train(encoder, critic, stream):
        optimizer = torch.optim.SGD([*encoder.parameters(), *critic.parameters()], lr=0.1, momentum=0.9)
        for x, _ in stream:
            optimizer.zero_grad()
            code = encoder(x)
            mixed = code.detach().requires_grad_()
            (smooth,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
            (steep,) = torch.autograd.grad(critic(code).square().sum(), code, create_graph=True)
            (((smooth.norm(dim=1) - 1) ** 2).mean() + steep.square().sum(1).mean()).backward()
            optimizer.step()

    torch.manual_seed(1)
    plain = network(), nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    models = copy.deepcopy(plain)
    train(*plain, batches(22, 7, 1))
    train(*map(samestep.replicate, models), samestep.loader(data(22), 7, shuffle=True, seed=0))
    for model, original in zip(models, plain, strict=True):
        all_close(model, original)


class Centred(nn.Module):
    """A network that takes a mean over the whole batch in its forward."""

    def __init__(self, calls):
        super().__init__()
        torch.manual_seed(3)
        self.calls = calls
        self.body = network()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x):
        y = self.body(x)
        return y - self.calls.sum(y.sum(0)) / self.calls.sum(len(y)), self.scale


def of_all_pairs(calls, rank, y, scale):
    """As CLIP's loss: every rank has the whole of it."""
    images, texts = calls.gather(y.tanh()), calls.gather(y.cos())
    return cross_entropy(scale * images @ texts.T, torch.arange(len(images)))


def of_own_rows(calls, rank, y, scale):
    """As SimCLR's: every rank has its rows of it."""
    before = sum(calls.gather([len(y)])[:rank])
    return cross_entropy(scale * y.tanh() @ calls.gather(y.cos()).T, before + torch.arange(len(y)))


def of_the_mean(calls, rank, y, scale):
    return calls.mean((scale * y).square().mean())


@pytest.mark.parametrize(("loss", "length"), [(of_all_pairs, 22), (of_own_rows, 19), (of_the_mean, 22)])
def test_a_loss_of_all_ranks_values_trains_as_in_the_serial_script(world, loss, length):
    def train(model, stream, rank):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for x, _ in stream:
            optimizer.zero_grad()
            loss(model.calls, rank, *model(x)).backward()
            optimizer.step()

    def same(value):
        return value

    plain = Centred(SimpleNamespace(sum=same, mean=same, gather=same))
    model = samestep.replicate(Centred(samestep))
    train(plain, batches(length, 7, 1), 0)
    train(model, samestep.loader(data(length), 7, shuffle=True, seed=0), world.rank)
    all_close(model, plain)


def test_frozen_parameters_stay_and_the_others_follow_the_serial_script(world):
    model, plain = network(), network()
    for net in (model, plain):
        net[0].requires_grad_(False)
    before = plain[0].weight.clone()
    expected = serial(plain, 23, 7)
    assert shared(model, 23, 7) == pytest.approx(expected, rel=PRECISION)
    all_close(model, plain)
    assert torch.equal(model[0].weight, before)


@pytest.mark.sizes(3)
def test_a_plain_mean_over_ranks_would_have_been_wrong(world):
    """The control: without weights the ragged batches of these tests would show."""
    model, plain = network(), network()
    expected = serial(plain, 23, 7)
    model = samestep.replicate(model)
    optimizer = optimizer_of(model)
    losses = []
    for x, y in samestep.loader(data(23), 7, shuffle=True, seed=0):
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(samestep.mean(loss.detach(), weight=1).item())
    assert losses != pytest.approx(expected[: len(losses)], rel=1e-4)
