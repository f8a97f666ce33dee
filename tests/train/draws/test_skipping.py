import pytest
import torch

from samestep.train.batch.parts import Part
from samestep.train.draws.skipping import Skipping
from samestep.train.passes import Rows

FILLS = {"bernoulli_.float": (0.3,), "uniform_": (-1.0, 1.0), "exponential_": (), "normal_": ()}
# shape for one row, the batch's dimension, elements of that dimension for a row, and the order in memory
BATCH_FIRST = (1, 2, 301), 0, 1, (0, 1, 2)
SEVERAL_TO_A_ROW = (3, 201), 0, 3, (0, 1)
TIME_FIRST = (4, 1, 301), 1, 1, (0, 1, 2)
TIME_FIRST_IN_MEMORY = (1, 4, 301), 0, 1, (1, 0, 2)
BATCH_LAST = (1200, 1), 1, 1, (0, 1)


@pytest.mark.parametrize(
    "laid", [BATCH_FIRST, SEVERAL_TO_A_ROW, TIME_FIRST, TIME_FIRST_IN_MEMORY, BATCH_LAST]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", FILLS)
@pytest.mark.parametrize("rows", [(0, 2), (3, 1), (5, 2)], ids=str)
def test_skipping_draws_the_rows_of_the_whole_draw_or_nothing(name, dtype, rows, laid):
    def draw(into, generator):
        return getattr(into, name.split(".")[0])(*FILLS[name], generator=generator)

    def empty(rows):
        return torch.empty_permuted(
            [size * rows if at == dim else size for at, size in enumerate(sizes)], order, dtype=dtype
        )

    (start, mine), skipping, (sizes, dim, each, order) = rows, Skipping(), laid
    torch.manual_seed(1)
    whole, after = draw(empty(7), None), torch.rand(1)
    torch.manual_seed(1)
    before, part = torch.get_rng_state(), empty(mine)
    drew = skipping.drew(name, part, Part(dim, Rows(mine, start, 7), after=each, layout=order), draw)
    # normal numbers are made in pairs, and others where there are fewer than 16; pieces of sizes value are not worth it
    assert drew == (name != "normal_" and laid is not BATCH_LAST)
    if drew:
        assert torch.equal(part, whole.narrow(dim, start * each, mine * each))
        assert torch.equal(torch.rand(1), after)
    else:
        assert torch.equal(torch.get_rng_state(), before)


def test_elements_that_are_chosen_are_no_pieces():
    chosen = Part(0, Rows(2, 1, 7), chosen=torch.tensor([1, 3]))
    assert chosen.pieces(torch.empty(2, 5)) is None
