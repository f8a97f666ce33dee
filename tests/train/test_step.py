"""A gradient counts by the share that it was computed from, whatever other passes are open."""

import gc
import weakref
from contextlib import redirect_stderr
from io import StringIO

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.data import TensorDataset

import samestep
from samestep import RanksDiffer
from samestep.train.batch.watching import Watching
from samestep.train.draws.draws import Draws
from samestep.train.group.world import joined
from samestep.train.passes import Pass, Share
from samestep.train.step import spine
from samestep.train.subscriber import Subscriber

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
        assert spine().origins.trained.mine in (64 // world.size, 64 // world.size + 1)
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


def test_batches_collected_in_a_list_count_by_their_own_shares(world):
    model = samestep.replicate(network())
    for (rows,) in list(samestep.loader(TensorDataset(SMALL), 5)):
        expected = serial(samestep.gather(rows))
        torch.testing.assert_close(gradient(model, model(rows).square().mean()), expected)


def test_two_training_loaders_are_weighed_each_by_its_own_share(world):
    model = samestep.replicate(network(), find_unused_parameters=False)
    first, second = samestep.loader(TensorDataset(ROWS), 64), samestep.loader(TensorDataset(SMALL), 7)
    for (rows,), (small,) in zip(first, second, strict=False):
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
    assert spine().origins.at_hand is None
    assert spine().origins.trained is None


def test_passes_that_were_left_are_forgotten_and_keep_no_data_alive(world):
    dead = []
    for _ in range(20):
        loader = samestep.loader(TensorDataset(torch.zeros(8, 1)), 8)
        next(iter(loader))
        dead.append(weakref.ref(loader.dataset))
        del loader
    gc.collect()
    assert len(spine().origins._passes) <= 8
    assert not any(reference() for reference in dead)


def test_a_share_knows_its_samples_while_its_pass_goes_on():
    order = torch.tensor([5, 3, 4, 1])
    begun = Pass(nn.Identity(), 0, training=True)
    begun.take_order(order, 0)
    share = Share(begun, 0, 1, 2, 4)
    assert share.samples.tolist() == [3, 4]
    assert (share.weight(1), share.weight(3)) == (0.5, 1.5)
    del order
    assert share.samples.tolist() == []


def test_a_share_knows_its_rows_of_the_batch():
    share = Share(Pass(nn.Identity(), 0, training=True), 8, 10, 2, 6)
    assert share.rows == (2, 2, 6)
    assert (share.first, share.last, share.step) == (True, True, -1)


def test_of_many_passes_that_were_left_the_last_eight_are_kept(world):
    loaders = [samestep.loader(TensorDataset(torch.zeros(8, 1)), 8) for _ in range(12)]
    for loader in loaders:
        next(iter(loader))
    assert [old.of for old in spine().origins._passes] == loaders[-8:]


def test_a_position_is_the_pass_the_epoch_and_the_samples_handed_out(world):
    samestep.replicate(network())
    loader = samestep.loader(TensorDataset(ROWS), 32)
    assert len(list(loader)) == 2
    begun, _, samples = spine()._position
    next(iter(loader))
    assert (samples, spine()._position) == (64, (begun + 1, 1, 32))


class Heard(Subscriber):
    """Writes down what it is told."""

    def __init__(self):
        self.events = []
        spine().subscribe(self)
        spine().subscribe(self)

    def backward_begins(self, loss):
        self.events.append("backward")

    def pass_begins(self, begun):
        self.events.append("pass begins")

    def step_begins(self, share):
        self.events.append(f"step {share.step - self.first} begins")

    def microbatch_begins(self, share):
        self.events.append(f"microbatch begins{' first' * share.first}{' last' * share.last}")

    def microbatch_ends(self, share):
        self.events.append("microbatch ends")

    def step_ends(self, share):
        self.events.append("step ends")

    def pass_ends(self, ended):
        self.events.append("pass ends")


def test_a_subscriber_is_told_once_of_every_pass_step_microbatch_and_backward(world):
    model, heard = samestep.replicate(network()), Heard()
    heard.first = spine().steps
    for (rows,) in samestep.loader(TensorDataset(ROWS), 32):
        model(rows).sum().backward()
    step = ["backward", "step ends"]
    assert heard.events == ["pass begins", "step 0 begins", *step, "step 1 begins", *step, "pass ends"]
    heard.events.clear()
    for step in samestep.steps(TensorDataset(ROWS[:12]), 12, microbatch=2):
        for (rows,) in step:
            model(rows).sum().backward()
    count = 6 // world.size
    marks = [f"microbatch begins{' first' * (at == 0)}{' last' * (at == count - 1)}" for at in range(count)]
    inside = [event for mark in marks for event in (mark, "backward", "microbatch ends")]
    assert heard.events == ["pass begins", "step 2 begins", *inside, "step ends", "pass ends"]


def test_what_mixes_samples_is_looked_for_in_a_batch_and_not_in_a_microbatch(world):
    """A microbatch is whole on one rank, and looking took a tenth of a second of the first step after a restart."""
    samestep.replicate(network())
    watching, seen = joined().the(Draws).watching, []
    for _ in samestep.loader(TensorDataset(ROWS[:12]), 12):
        seen.append(watching.places is not None)
    for step in samestep.steps(TensorDataset(ROWS[:12]), 12, microbatch=2):
        seen += [watching.places is not None for _ in step]
    assert (seen[0], any(seen[1:])) == (world.size > 1, False)


def test_what_mixes_samples_is_not_looked_for_again_after_a_restart(world):
    samestep.replicate(network())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spine().group, "restarts", 1)
        watching = Watching(spine(), lambda name, why: "")
        spine().subscribe(watching)
        for _ in samestep.loader(TensorDataset(ROWS[:12]), 12):
            assert watching.places is None
        spine()._subscribers.remove(watching)


@pytest.mark.parametrize("same", [False, True])
def test_an_evaluation_in_inference_mode_inside_of_a_step_leaves_torch_whole(world, same):
    """torch's random_ failed where the mode that follows a batch was taken off inside of inference_mode()."""
    model = samestep.replicate(network(), same=same)
    validation = samestep.loader(TensorDataset(SMALL), 5)
    for (rows,) in samestep.loader(TensorDataset(ROWS[:12]), 12):
        model(rows).square().mean().backward()
        with torch.inference_mode():
            model.eval()
            assert samestep.sum(sum(len(model(some)) for (some,) in validation)) == 7
            model.train()
        torch.empty((), dtype=torch.int64).random_()
    assert not _get_current_dispatch_mode_stack()


def test_whether_a_pass_trains_is_told_by_autograd_and_by_the_models(world):
    assert spine().is_training(False) == (world.size == 1)
    model = samestep.replicate(network())
    assert spine().is_training(False)
    with torch.no_grad():
        assert not spine().is_training(True)
    model.eval()
    assert spine().is_training(False) == (world.size == 1)
    assert spine().is_training(True)


@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_loop_that_steps_an_optimizer_trains_in_eval_mode_too(world, is_scaled, is_wrapped):
    model, expected = samestep.replicate(network()).eval(), network()
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", enabled=False)
    reference = torch.optim.SGD(expected.parameters(), 0.1)
    batches = samestep.loader(TensorDataset(SMALL), 3)  # of 3, 3 and 1 samples
    for (rows,) in map(list, batches) if is_wrapped else batches:
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        scaler.step(optimizer) if is_scaled else optimizer.step()
    for rows in SMALL.split(3):
        reference.zero_grad()
        expected(rows).square().mean().backward()
        reference.step()
    torch.testing.assert_close(model.weight, expected.weight)


def test_totals_count_the_batch_in_a_loop_and_the_pass_after_it(world):
    at = spine().origins
    for (rows,) in samestep.loader(TensorDataset(SMALL), 4):
        assert (at.counted, at.is_lent) == (len(rows), False)
    assert at.counted == samestep.gather([at.counted])[world.rank] != 0
    assert samestep.sum(at.counted) == 7
    assert at.at_hand is None


@pytest.mark.sizes(2, 3)
def test_a_rank_that_takes_a_sample_of_another_has_no_weight(world):
    model, at = samestep.replicate(network()), spine()
    for (rows,) in samestep.loader(TensorDataset(SMALL[:1]), 4):
        assert at.origins.is_lent == (world.rank > 0)
        assert at.weights.of_mean(at.models) == (world.size if world.rank == 0 else 0)
        torch.testing.assert_close(gradient(model, model(rows).square().mean()), serial(SMALL[:1]))
    assert at.weights.of_mean(at.models) == 1.0


@pytest.mark.sizes(2, 3)
def test_behind_a_loop_that_takes_batches_by_next_what_every_rank_added_up_counts(world):
    samestep.replicate(network())
    train = samestep.loader(TensorDataset(ROWS[:8]), 3, shuffle=True)
    batches, num_seen, num_inside = iter(train), 0, 0
    for _ in range(len(train)):
        (rows,) = next(batches)
        num_seen += len(rows) if train.share else 0
        num_inside += samestep.sum(len(rows))
    assert samestep.sum(num_seen) == num_inside == 8


@pytest.mark.sizes(2, 3)
def test_ranks_at_different_samples_are_named_at_their_next_message(world, monkeypatch):
    monkeypatch.setenv("SAMESTEP_CHECK_EVERY", "0")  # which has a message of its own in the first steps
    samestep.replicate(network())
    taken = iter(samestep.loader(TensorDataset(ROWS), 8))
    for _ in range(1 + (world.rank == world.size - 1)):
        next(taken)
    odd = rf"at epoch 1, sample 8 of its training and rank {world.size - 1} at epoch 1, sample 16; every rank"
    with pytest.raises(RanksDiffer, match=odd) as caught:
        samestep.sum(1)
    assert caught.value.ranks == (world.size - 1,)
    if world.rank < world.size - 1:
        next(taken)
    assert samestep.sum(1) == world.size


@pytest.mark.sizes(2, 3)
def test_two_loaders_that_split_differently_are_said_once_where_an_input_is_computed(world):
    model = samestep.replicate(network())
    spine().group._said.clear()
    with redirect_stderr(StringIO()) as said:
        for rows, other in ((64, 64), (64, 7)):
            for _ in range(2):
                pair = (
                    samestep.loader(TensorDataset(ROWS), rows),
                    samestep.loader(TensorDataset(SMALL), other),
                )
                for (batch,), _ in zip(*pair, strict=False):
                    with torch.no_grad():
                        model(batch + 0)
                    if rows != other:
                        model(batch + 0).sum().backward()
    assert said.getvalue().count("two loaders are iterated together") == (world.rank == 0)
