"""Noise of a fixed size, as of a GAN's generator, is not shared: each rank draws all of it."""

from contextlib import redirect_stderr
from io import StringIO

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import samestep
from samestep.train.draws.draws import Draws
from samestep.train.group.world import joined

SAID = "draws as many rows as the whole batch has"


@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize(("rows", "same"), [(6, False), (6, True), (None, False)])
def test_noise_of_a_fixed_size_in_the_loop_is_said_by_default(world, rows, same):
    joined()._said.clear()
    joined().the(Draws).watching._watched_kinds.clear()
    model = samestep.replicate(nn.Linear(2, 1), same=same)
    with redirect_stderr(StringIO()) as said:
        for (x,) in samestep.loader(TensorDataset(torch.rand(23, 2)), 6, drop_last=True):
            model(torch.randn(rows or len(x), 2)).mean().backward()
    assert (SAID in said.getvalue()) == (rows is not None and not same and world.rank == 0)
