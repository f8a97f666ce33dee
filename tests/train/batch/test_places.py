"""Where tensors have the batch, in a few cases that whole scripts meet seldom."""

import torch

from samestep.train.batch.places import BatchPlaces
from samestep.train.batch.sizes import Place
from samestep.train.passes import Pass, Share


def shared(data):
    return Share(Pass(data, 0, training=True), 0, 0, 4, 8)


def test_what_all_ranks_joined_has_no_place_of_the_batch_also_where_the_drawing_operation_gets_it():
    """As CUDA's fused dropout gets it: rank 0's 4 samples and the others' are 8 rows, twice as many as its share."""
    x, joined = torch.randn(4, 3), torch.randn(8, 3)
    data = torch.utils.data.TensorDataset(x)
    found = BatchPlaces(shared(data), [(x, None)], (), is_joined=lambda tensor: tensor is joined)
    assert found.place(joined) == Place(None)
    assert found.place(x) != Place(None)


def test_a_parameter_of_a_distribution_that_no_operation_made_is_no_endless_guess():
    spread = torch.distributions.MultivariateNormal(torch.zeros(2), torch.eye(2))
    x = torch.randn(4, 2)
    guessed = []

    def is_new(tensor):
        guessed.append(tensor)
        return True

    with BatchPlaces(shared(spread), [(x, None)], (), is_new=is_new):
        spread.log_prob(x)
    assert len(guessed) < 100
