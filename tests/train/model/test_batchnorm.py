"""BatchNorm's statistics: rank 0's on every rank after a pass, or the whole batch's where asked."""

import copy
import inspect
import pickle
from contextlib import redirect_stderr
from io import StringIO

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import samestep
from samestep import UsageError
from samestep.train.draws.draws import Draws
from samestep.train.group.world import joined
from samestep.train.step import spine
from samestep.train.subscriber import Subscriber


def data(length=11):
    draw = torch.Generator(torch.get_default_device()).manual_seed(2)
    return TensorDataset(torch.rand(length, 3, 4, generator=draw, dtype=torch.float64))


def made(seed=0, **options):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.BatchNorm1d(3, **options), nn.Flatten(), nn.Linear(12, 2), nn.BatchNorm1d(2)
    ).double()


def train(model, loader):
    for (x,) in loader:
        model(x).square().mean().backward()


def equal_on_all_ranks(model):
    for buffer in model.buffers():
        every = samestep.gather(buffer[None])
        assert all(torch.equal(value, every[0]) for value in every)


def own_statistics(model):
    return [buffer.clone() for buffer in model.buffers()]


@pytest.mark.parametrize("other_buffer", [False, True])
def test_after_a_pass_the_statistics_are_rank_0s_on_every_rank(world, other_buffer):
    model = made()
    if other_buffer:
        model.register_buffer("position", torch.ones(2, dtype=torch.bool))
    samestep.replicate(model)
    for (x,) in samestep.loader(data(16), 8):
        model(x).square().mean().backward()
        mine = own_statistics(model)
    equal_on_all_ranks(model)
    if world.rank == 0:
        assert all(torch.equal(*pair) for pair in zip(mine, model.buffers(), strict=True))


def test_after_a_loop_that_was_left_the_first_evaluation_makes_buffers_equal(world):
    model = samestep.replicate(made())
    for (x,) in samestep.loader(data(16), 8):
        model(x).square().mean().backward()
        break
    model.eval()
    with torch.no_grad():
        model(data().tensors[0])
    equal_on_all_ranks(model)


@pytest.mark.sizes(2, 3)
def test_who_keeps_buffers_apart_by_an_option_of_ddp_finds_them_apart(world):
    # torch 2.11 has only the second name
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    option = next(name for name in ("forward_sync_buffers", "broadcast_buffers") if name in known)
    model = samestep.replicate(made(), **{option: False})
    train(model, samestep.loader(data(16), 8))
    every = samestep.gather(model[0].running_mean[None])
    assert not torch.equal(every[0], every[1])


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("track", [True, False])
def test_synced_statistics_and_gradients_are_those_of_the_whole_batch(world, momentum, affine, track):
    options = {"momentum": momentum, "affine": affine, "track_running_stats": track}
    model = samestep.replicate(made(**options), sync_batchnorm=True)
    plain = made(**options)
    loader = samestep.loader(data(), 3)
    train(model, loader)
    whole = data().tensors[0]
    for at in range(0, 11, 3):
        plain(whole[at : at + 3]).square().mean().backward()
    for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(parameter.grad, other.grad, rtol=1e-9, atol=1e-14), name
    for (name, buffer), other in zip(model.named_buffers(), plain.buffers(), strict=True):
        assert torch.allclose(buffer.double(), other.double(), rtol=1e-12), name


def test_without_running_statistics_an_evaluation_takes_those_of_the_whole_batch(world):
    model = samestep.replicate(made(track_running_stats=False), sync_batchnorm=True).eval()
    plain = made(track_running_stats=False).eval()
    whole = data(12).tensors[0]
    with torch.no_grad():
        rows = samestep.gather(torch.cat([model(x) for (x,) in samestep.loader(data(12), 6)]))
        wanted = plain(whole[:6]), plain(whole[6:])
    torch.testing.assert_close(rows, torch.cat(wanted))
    if world.rank == 0:  # outside of a loader a rank may evaluate alone
        torch.testing.assert_close(model(whole), plain(whole))


def test_synced_layers_stay_batchnorms_and_their_copies_are_plain_ones(world):
    model = samestep.replicate(made(), sync_batchnorm=True)
    assert isinstance(model[0], nn.BatchNorm1d)
    assert list(model.state_dict()) == list(made().state_dict())
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.copy(model[0])):
        assert not any("samestep" in type(module).__module__ for module in copied.modules())
    if world.rank == 0:
        copy.deepcopy(model)(data().tensors[0])
    assert samestep.sum(1) == world.size


@pytest.mark.sizes(2, 3)
def test_one_value_per_channel_in_the_whole_batch_is_an_error(world):
    model = samestep.replicate(nn.BatchNorm1d(3), sync_batchnorm=True)
    loader = samestep.loader(TensorDataset(torch.rand(1, 3)), 4)
    with pytest.raises(
        UsageError, match="BatchNorm got 1 value per channel in the whole batch; train on at least 2"
    ):
        train(model, loader)


def test_a_batch_that_every_rank_has_counts_once(world):
    model, plain = samestep.replicate(made(), sync_batchnorm=True), made()
    fixed = torch.rand(5, 3, 4, generator=torch.Generator(torch.get_default_device()).manual_seed(1)).double()
    for x in (*(x for (x,) in samestep.loader(data(8), 8)), fixed):
        model(x)
    for x in (data(8).tensors[0], fixed):
        plain(x)
    for buffer, other in zip(model.buffers(), plain.buffers(), strict=True):
        assert torch.allclose(buffer, other, rtol=1e-12)


def test_shares_that_are_alike_by_chance_count_each_of_their_samples(world):
    """As a token that is expanded to the batch: all ranks have the same statistics, and each a share."""
    model, plain = samestep.replicate(made(), sync_batchnorm=True), made()
    row = torch.rand(3, 4, generator=torch.Generator(torch.get_default_device()).manual_seed(1)).double()
    alike = torch.stack([row] * 6)
    for (x,) in samestep.loader(TensorDataset(alike), 6):
        model(x)
    plain(alike)
    for buffer, other in zip(model.buffers(), plain.buffers(), strict=True):
        assert torch.allclose(buffer, other, rtol=1e-12)


def test_synced_layers_for_images_keep_bfloat16_and_take_the_variance_of_the_whole_batch(world):
    for kind, shape in ((nn.BatchNorm2d, (7, 3, 2, 2)), (nn.BatchNorm3d, (7, 3, 2, 2, 2))):
        draw = torch.Generator(torch.get_default_device()).manual_seed(0)
        images = torch.rand(shape, generator=draw).bfloat16()
        model = samestep.replicate(kind(3), sync_batchnorm=True)
        plain = kind(3)
        for (x,) in samestep.loader(TensorDataset(images), 7):
            assert model(x).dtype == plain(x).dtype
        plain = kind(3)
        plain(images)
        assert torch.allclose(model.running_var, plain.running_var, rtol=1e-2)


@pytest.mark.sizes(2, 3)
def test_statistics_taken_anew_without_gradients_are_everyones_too(world):
    model = samestep.replicate(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(24, 4))
    with torch.no_grad():
        for (x,) in samestep.loader(data, 12):
            model(x)
        own = samestep.gather(model[1].running_mean[None])
        model.eval()(x)
        ranks = samestep.gather(model[1].running_mean[None])
    assert not torch.equal(own[0], own[1])
    assert all(torch.equal(mean, own[0]) for mean in ranks)


@pytest.mark.sizes(2, 3)
def test_unequal_numbers_of_microbatches_are_refused_before_the_first_step(world):
    model = samestep.replicate(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), sync_batchnorm=True)
    rows = TensorDataset(torch.rand(28, 3))
    for step in samestep.steps(rows, 12, microbatch=2, drop_last=True):
        for (x,) in step:
            model(x).sum().backward()
    uneven = samestep.steps(rows, 12 if world.size == 3 else 9, microbatch=2 if world.size == 3 else 3)
    with pytest.raises(UsageError, match=rf"a step of \d microbatches gives the {world.size} ranks unequal"):
        next(iter(uneven))


class Heard(Subscriber):
    def __init__(self):
        self.calls = []
        spine().subscribe(self)

    def phase_begins(self, phase, call):
        self.calls += [call] * call.startswith("BatchNorm")


@pytest.mark.sizes(2, 3)
def test_a_layer_exchanges_once_in_forward_and_once_in_backward(world):
    model = samestep.replicate(made(), sync_batchnorm=True)
    heard = Heard()
    for (x,) in samestep.loader(data(), 11):
        out = model(x).square().mean()
        assert len(heard.calls) == 2
        out.backward()
    # the first layer's input needs no gradient, and its weights alone need no other rank
    assert len(heard.calls) == 3


@pytest.mark.sizes(2, 3)
def test_a_rank_without_rows_takes_the_statistics_of_the_others(world):
    model, plain = samestep.replicate(made(), sync_batchnorm=True), made()
    for (x,) in samestep.loader(data(), 11):
        model(x[:0] if world.rank == 0 else x)
        others = samestep.gather(x[:0] if world.rank == 0 else x)
    plain(others)
    for mine, wanted in zip(model.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(mine, wanted)


@pytest.mark.sizes(2, 4)
def test_a_penalty_of_gradients_goes_through_the_statistics_of_all_ranks(world):
    rows = data(8).tensors[0].flatten(1)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(12, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 2)).double()
    model = samestep.replicate(copy.deepcopy(plain), sync_batchnorm=True)

    def penalty(judge, x):
        x = x.clone().requires_grad_()
        scores = judge(x)
        (slope,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
        return scores.mean() + slope.norm(dim=1).sub(1).square().mean()

    penalty(plain, rows).backward()
    for (x,) in samestep.loader(TensorDataset(rows), 8):
        penalty(model, x).backward()
    for (name, mine), wanted in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine.grad, wanted.grad), name


@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize(
    ("optimizer", "bias", "on"),
    [("Adam", True, True), ("RMSprop", True, True), ("SGD", True, False), ("Adam", False, False)],
)
def test_a_bias_before_a_batchnorm_is_said_where_the_optimizer_amplifies_rounding(world, optimizer, bias, on):
    joined()._said.clear()
    layers = nn.Linear(12, 3, bias=bias), nn.BatchNorm1d(3), nn.Linear(3, 2)
    model = samestep.replicate(nn.Sequential(nn.Flatten(), *layers).double(), sync_batchnorm=True)
    steps = getattr(torch.optim, optimizer)(model.parameters(), 0.1)
    with redirect_stderr(StringIO()) as said:
        for (x,) in samestep.loader(data(16), 8):
            model(x).square().mean().backward()
            steps.step()
    text = (
        "1.bias of Sequential is a bias before a BatchNorm, which takes it away again: its gradient is rounding "
        f"alone, and {optimizer} makes steps of that"
    )
    assert said.getvalue().count(text) == (on and world.rank == 0)
    assert " a bias before " not in said.getvalue().replace(text, "")


@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize(
    ("layer", "on"),
    [
        (lambda: nn.Dropout2d(0.1), True),
        (lambda: nn.GRU(2, 2, 2, dropout=0.1), True),
        (lambda: nn.Dropout(0.0), False),
        (lambda: nn.GRU(2, 2), False),
    ],
)
def test_dropout_is_said_where_each_rank_draws_for_itself(world, layer, on):
    for same in (False, True):
        joined()._said.clear()
        with redirect_stderr(StringIO()) as said:
            samestep.replicate(nn.Sequential(nn.Linear(2, 2), layer()), same=same)
        joined().the(Draws).close()
        text = "dropout draws other masks than in the serial script; samestep run --same"
        assert said.getvalue().count(text) == (on and not same and world.rank == 0)
