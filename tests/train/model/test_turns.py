"""The order in which ranks exchange the gradients of several models is compared."""

import pytest
import torch
from torch import nn

import samestep
from samestep import RanksDiffer


@pytest.mark.sizes(2, 3)
def test_models_of_equal_sizes_whose_backwards_come_in_another_order_on_one_rank_are_told(world):
    models = [samestep.replicate(nn.Linear(3, 1)) for _ in range(2)]
    for step in range(3):
        for model in models[:: -1 if step == 1 and world.rank == 1 else 1]:
            model(torch.ones(2, 3)).sum().backward()
        if step == 0:
            samestep.sum(1)
    odd = (
        "rank 1 called .* in another order" if world.size == 3 else "ranks 0, 1 called .* in different orders"
    )
    with pytest.raises(RanksDiffer, match=odd):
        samestep.sum(1)
