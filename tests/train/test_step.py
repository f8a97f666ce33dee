"""A gradient counts by the share that it was computed from, whatever other passes are open."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import samestep
from samestep.train.step import Pass, Share, spine

ROWS = torch.rand(64, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
SMALL = torch.rand(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Linear(3, 1, dtype=torch.float64)


def gradient(model, loss):
    model.zero_grad()
    loss.backward()
    return model.weight.grad.clone()


def serial(*batches):
    """The gradient of the sum of the batches' mean losses."""
    model = network()
    return gradient(model, sum(model(rows).square().mean() for rows in batches))


@pytest.mark.parametrize("is_held", [True, False], ids=["held", "collected"])
def test_an_open_validation_iterator_does_not_change_the_weight_of_a_training_batch(world, is_held):
    model = samestep.replicate(network())
    validation = iter(samestep.loader(TensorDataset(SMALL), 5))
    next(validation)
    if not is_held:
        del validation
        gc.collect()
    for (rows,) in samestep.loader(TensorDataset(ROWS), 64):
        assert spine().trained.mine in (64 // world.size, 64 // world.size + 1)
        torch.testing.assert_close(gradient(model, model(rows).square().mean()), serial(ROWS))


def test_a_validation_pass_left_between_a_batch_and_its_forward_does_not_weigh_it(world):
    model = samestep.replicate(network())
    for (rows,) in samestep.loader(TensorDataset(ROWS), 64):
        with torch.no_grad():
            model.eval()
            held = iter(samestep.loader(TensorDataset(SMALL), 5))
            next(held)
            model.train()
        torch.testing.assert_close(gradient(model, model(rows * 1.0).square().mean()), serial(ROWS))


def test_two_training_loaders_are_weighed_each_by_its_own_share(world):
    model = samestep.replicate(network(), find_unused_parameters=False)
    one, other = samestep.loader(TensorDataset(ROWS), 64), samestep.loader(TensorDataset(SMALL), 7)
    for (rows,), (small,) in zip(one, other, strict=False):
        for parts in ([rows], [small]):
            got = gradient(model, sum(model(part).square().mean() for part in parts))
            torch.testing.assert_close(got, serial(ROWS if parts[0] is rows else SMALL))


def test_a_batch_taken_by_next_is_weighed_after_its_iterator_is_gone(world):
    model = samestep.replicate(network())
    train = samestep.loader(TensorDataset(ROWS), 64)
    (rows,) = next(iter(train))
    for _ in range(2):
        gc.collect()
        torch.testing.assert_close(gradient(model, model(rows - 0.0).square().mean()), serial(ROWS))


def test_an_inner_pass_that_is_finished_gives_the_outer_batch_back(world):
    model = samestep.replicate(network())
    outer, inner = samestep.loader(TensorDataset(ROWS), 64), samestep.loader(TensorDataset(SMALL), 7)
    for (rows,) in outer:
        for (small,) in inner:
            torch.testing.assert_close(gradient(model, model(small).square().mean()), serial(SMALL))
        torch.testing.assert_close(gradient(model, model(rows).square().mean()), serial(ROWS))
    assert spine().at_hand is None
    assert spine().trained is None


def test_passes_that_were_left_are_forgotten_and_keep_no_data_alive(world):
    at = spine()
    dead = []
    for _ in range(20):
        loader = samestep.loader(TensorDataset(torch.zeros(8, 1)), 8)
        next(iter(loader))
        dead.append(weakref.ref(loader.dataset))
        del loader
    gc.collect()
    assert len(at._passes) <= 8
    assert not any(one() for one in dead)


def test_a_share_knows_its_samples_while_its_pass_goes_on():
    order = torch.tensor([5, 3, 4, 1])
    begun = Pass(nn.Identity(), 0, training=True)
    begun.take_order(order, 0)
    share = Share(begun, 0, 1, 2, 4)
    assert share.samples.tolist() == [3, 4]
    assert (share.weight(1), share.weight(3)) == (0.5, 1.5)
    del order
    assert share.samples.tolist() == []
