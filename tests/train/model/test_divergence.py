"""Replicas that should be equal are compared, and the one that is not is named."""

import gc
import os
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep
from samestep import RanksDiffer, UsageError
from samestep.train.model.divergence import pace
from samestep.train.step import spine


def run(model, steps, flip_at=None, rank=None):
    """Train, with one bit flipped before a step on one rank; how many steps were taken."""
    world = samestep.init()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(6 * steps, 4), torch.arange(6 * steps) % 2)
    train = samestep.loader(data, 6, seed=steps)
    first = spine().steps
    for number, (x, y) in enumerate(train):
        if number == flip_at and rank == world.rank:
            model[2].weight.data.view(torch.int32)[1, 3] ^= 1 << 3
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return spine().steps - first


def network():
    return samestep.replicate(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))


@pytest.mark.sizes(2, 3)
def test_a_flipped_bit_is_found_within_k_steps_and_named(world):
    os.environ["SAMESTEP_CHECK_EVERY"] = "5"
    try:
        for trial in range(8):
            odd, flipped = trial % world.size, spine().steps + 2 + trial % 5
            with pytest.raises(
                RanksDiffer, match=r"came apart between steps \d+ and \d+: 2\.weight"
            ) as caught:
                run(network(), 12, flip_at=1 + trial % 5, rank=odd)
            before, after = map(int, re.findall(r"steps (\d+) and (\d+)", str(caught.value))[0])
            assert before < flipped <= after <= before + 5
            if world.size == 3:
                others = ", ".join(str(rank) for rank in range(3) if rank != odd)
                assert f"of rank {odd} is not what ranks {others} have" in str(caught.value)
            else:
                assert "differs between rank 0 and rank 1; let every rank load" in str(caught.value)
            # a replica that lives on in a traceback would be compared in the next trial too
            del caught
            gc.collect()
    finally:
        del os.environ["SAMESTEP_CHECK_EVERY"]


class Turned(nn.Module):
    def __init__(self):
        super().__init__()
        self.turn = nn.Parameter(torch.ones(4, dtype=torch.complex128))
        self.norm = nn.BatchNorm1d(4).double()

    def forward(self, x):
        return self.norm((self.turn * x).real)


@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize("planted", ["turn", "norm.running_var", None])
def test_a_complex_parameter_and_a_buffer_of_an_exact_replica_are_compared(world, planted):
    os.environ["SAMESTEP_CHECK_EVERY"] = "1"
    model = samestep.replicate(Turned(), exact=True)
    rows = torch.rand(
        36, 4, dtype=torch.float64, generator=torch.Generator(torch.get_default_device()).manual_seed(0)
    )

    def train():
        for number, step in enumerate(samestep.steps(TensorDataset(rows), 12, microbatch=2)):
            for (x,) in step:
                model(x).square().sum().backward()
            model.zero_grad()
            if number == 1 and planted and world.rank == 1:
                kept.append(model.state_dict()[planted].clone())
                model.state_dict()[planted][0] += 1

    kept = []
    try:
        if planted is None:
            return train()
        with pytest.raises(RanksDiffer, match=rf"came apart between steps \d+ and \d+: {planted}") as raised:
            train()
        assert raised.value.ranks == ((1,) if world.size == 3 else ())  # of two, none is known to be right
    finally:
        for value in kept:  # a replica that lives on would be compared in the next test too
            model.state_dict()[planted].copy_(value)
        del os.environ["SAMESTEP_CHECK_EVERY"]
        torch.use_deterministic_algorithms(False)


@pytest.mark.slow
def test_equal_replicas_raise_no_alarm(world):
    os.environ["SAMESTEP_CHECK_EVERY"] = "1"
    try:
        assert run(network(), 100) == 100
    finally:
        del os.environ["SAMESTEP_CHECK_EVERY"]


def test_with_zero_replicas_are_never_compared(world):
    os.environ["SAMESTEP_CHECK_EVERY"] = "0"
    try:
        assert run(network(), 10, flip_at=1, rank=0) == 10
    finally:
        del os.environ["SAMESTEP_CHECK_EVERY"]


def test_an_interval_of_comparisons_that_is_no_number_is_refused(world):
    os.environ["SAMESTEP_CHECK_EVERY"] = "often"
    try:
        with pytest.raises(UsageError, match="SAMESTEP_CHECK_EVERY is 'often'"):
            run(network(), 1)
    finally:
        del os.environ["SAMESTEP_CHECK_EVERY"]


PACED = """
import sys, time, torch, samestep
from samestep.train.group.world import joined
from samestep.train.model.divergence import Divergence
torch.manual_seed(0)
model = samestep.replicate(torch.nn.Linear(4, 2))
for (x,) in samestep.loader(torch.utils.data.TensorDataset(torch.ones(6 * 105, 4)), 6):
    time.sleep(float(sys.argv[1]))
    model(x).square().mean().backward()
print(joined().the(Divergence)._every)
"""


@pytest.mark.slow
def test_replicas_are_compared_as_often_as_it_costs_a_hundredth(nest, tmp_path):
    assert [pace(steps) for steps in (0.01, 0.1, 0.15, 0.9, 5.0)] == [10, 10, 20, 100, 200]
    (tmp_path / "train.py").write_text(PACED)
    ranks = nest.start(tmp_path / "train.py", 2, "0.02", cwd=tmp_path)
    assert nest.wait(ranks) == [0, 0]
    assert int(ranks[0].said) in (10, 20, 50, 100)
