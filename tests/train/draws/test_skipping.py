import pytest
import torch

from samestep.train.batch.parts import Part
from samestep.train.draws.skipping import Skipping
from samestep.train.passes import Rows

FILLS = {"bernoulli_.float": (0.3,), "uniform_": (-1.0, 1.0), "exponential_": (), "normal_": ()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", FILLS)
@pytest.mark.parametrize("rows", [(0, 2), (3, 1), (5, 2)], ids=str)
def test_skipping_draws_the_rows_of_the_whole_draw_or_nothing(name, dtype, rows):
    def draw(into, generator):
        return getattr(into, name.split(".")[0])(*FILLS[name], generator=generator)

    (start, mine), skipping = rows, Skipping()
    torch.manual_seed(1)
    whole, after = draw(torch.empty(7 * 3, 5, dtype=dtype), None), torch.rand(1)
    torch.manual_seed(1)
    before, part = torch.get_rng_state(), torch.empty(mine * 3, 5, dtype=dtype)
    drew = skipping.drew(name, part, Part(0, Rows(mine, start, 7), after=3), draw)
    # normal numbers are made in pairs, and others where there are fewer than 16
    assert drew == (name != "normal_")
    if drew:
        assert torch.equal(part, whole[start * 3 : (start + mine) * 3])
        assert torch.equal(torch.rand(1), after)
    else:
        assert torch.equal(torch.get_rng_state(), before)
