"""How a replicated model has to be called for its gradients to be everyone's, and what is said where it is not."""

from contextlib import redirect_stderr
from io import StringIO

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import samestep
from samestep import UsageError

DATA = TensorDataset(torch.ones(13, 4))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.spare = nn.Linear(4, 3), nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, x):
        return self.second(self.first(x))

    def loss(self, x):
        return self.second(self.first(x)).mean()


@pytest.mark.sizes(2, 3)
def test_gradients_of_another_method_are_not_exchanged_and_that_is_said_at_once(world):
    net = Net()
    net.spare = None
    model = samestep.replicate(net)
    for (x,) in samestep.loader(DATA, 4):
        with pytest.raises(UsageError, match=r"reached Net, which was not called in this batch"):
            model.loss(x).backward()


@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize(("part", "features"), [("first", 4), ("second", 3)])
def test_gradients_of_a_part_called_by_itself_are_noticed_at_either_end_of_the_model(world, part, features):
    net = Net()
    net.spare = None
    model = samestep.replicate(net)
    for (x,) in samestep.loader(DATA, 4):
        with pytest.raises(UsageError, match=r"reached Net, which was not called in this batch"):
            getattr(model, part)(x[:, :features]).sum().backward()


@pytest.mark.sizes(3)
def test_what_a_lent_batch_makes_of_the_loss_does_not_count_even_where_it_is_no_number(world):
    net = Net()
    net.spare = None
    model = samestep.replicate(net)
    for (x,) in samestep.loader(TensorDataset(torch.ones(2, 4)), 3, shuffle=True):
        loss = model(x).mean()
        (loss / 0 if world.rank == 2 else loss).backward()
    assert model.second.bias.grad.item() == 1
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_a_call_counts_for_every_gradient_of_its_batch_and_of_the_loss_kept_from_it(world):
    net = Net()
    net.spare = None
    model = samestep.replicate(net)
    kept = None
    for (x,) in samestep.loader(DATA, 4):
        if kept is not None:
            kept.backward()
        output = model(x)
        output.sum().backward(retain_graph=True)
        (output * 2).sum().backward()
        kept = model(x).sum()
    kept.backward()
    (model.first.weight.sum() * 2).backward()


@pytest.mark.sizes(3)
def test_loaders_iterated_together_are_remarked_once_where_an_input_is_of_neither_batch(world):
    net = Net()
    net.spare = None
    model = samestep.replicate(net)

    def train(change):
        with redirect_stderr(StringIO()) as said:
            for (x,), _ in zip(samestep.loader(DATA, 4), samestep.loader(DATA, 6), strict=False):
                model(change(x)).sum().backward()
        return said.getvalue().count("samestep: two loaders are iterated together")

    assert train(lambda x: x) == 0
    assert train(lambda x: x * 2) == (world.rank == 0)
    assert train(lambda x: x * 2) == 0


def test_a_network_is_trained_in_eval_mode_too(world):
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(13, 4))
    alone, shared = (
        nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).eval() for _ in range(2)
    )
    shared.load_state_dict(alone.state_dict())
    model = samestep.replicate(shared, exact=True)
    for step in samestep.steps(data, 13, microbatch=2, shuffle=True):
        for (x,) in step:
            model(x).square().mean().backward()
    alone(data.tensors[0]).square().mean().backward()
    for mine, whole in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, whole.grad)
    assert torch.equal(model[1].running_mean, torch.zeros(3))


def test_an_option_that_ddp_does_not_know_is_refused_at_any_size(world):
    with pytest.raises(UsageError, match="replicate knows no option bucket_cap"):
        samestep.replicate(Net(), bucket_cap=1)


@pytest.mark.sizes(3)
@pytest.mark.parametrize("weighs", [False, True])
def test_a_total_after_a_training_loop_in_which_samples_were_lent_is_said_once_unless_the_loop_weighs_it(
    world, weighs
):
    model = samestep.replicate(torch.nn.Linear(1, 1))
    with redirect_stderr(StringIO()) as said:
        for _ in range(2):
            total = 0
            train = samestep.loader(TensorDataset(torch.ones(8, 1)), 3, shuffle=True)
            for (x,) in train:
                model(x).sum().backward()
                if not weighs or train.share:
                    total += len(x)
            assert samestep.sum(total) == (8 if weighs else 10)
    is_said = world.rank == 0 and not weighs
    assert said.getvalue().count("a batch of 2 samples for 3 ranks") == is_said
