"""Nothing is said of an evaluation whose batches the script totals, nor of a mean in the loop that runs now."""

from contextlib import redirect_stderr
from io import StringIO

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils.data import DataLoader
from train.test_mistakes import DATA, look_again, network

import samestep


def of_samestep(correct):
    return samestep.sum(correct)


def of_torch(correct):
    dist.all_reduce(correct)
    return correct


def of_nobody(correct):
    return correct


@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize("total", [of_samestep, of_torch, of_nobody])
def test_an_evaluation_that_totals_each_batch_is_not_said_to_lack_a_total(world, total):
    look_again()
    model, train, test = samestep.replicate(network()), samestep.loader(DATA, 6), samestep.loader(DATA, 7)
    with redirect_stderr(StringIO()) as said:
        for _ in range(2):
            for x, y in train:
                F.mse_loss(model(x), y).backward()
            with torch.no_grad():
                sum(total((model(x) > y).sum()) for x, y in test)
    assert ("was not followed by" in said.getvalue()) == (total is of_nobody and world.rank == 0)


@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize("is_list", [False, True])
def test_a_loop_over_a_dataloader_is_said_to_train_on_all_samples_on_every_rank(world, is_list):
    look_again()
    model = samestep.replicate(network())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with redirect_stderr(StringIO()) as said:
        for x, y in DataLoader(list(DATA) if is_list else DATA, 6):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
    assert ("every rank goes through all 23 samples" in said.getvalue()) == (world.rank == 0)


@pytest.mark.sizes(2, 3)
def test_a_mean_in_a_loop_is_of_its_batch_also_where_no_model_is_replicated(world):
    look_again()
    model = network()
    with redirect_stderr(StringIO()) as said, torch.no_grad():
        for batch_size in (5, 6, 8):
            for x, y in samestep.loader(DATA, batch_size, shuffle=True):
                samestep.mean(F.mse_loss(model(x), y).item())
    assert "another loader was iterated since" not in said.getvalue()
