"""Recurrent layers over packed sequences draw the whole batch's masks with same=True."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import TensorDataset

import samestep


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.LSTM(3, 4, num_layers=3, dropout=0.5)

    def forward(self, rows, lengths):
        packed = pack_padded_sequence(rows.transpose(0, 1), lengths.cpu(), enforce_sorted=False)
        return self.layers(packed)[1][0][-1]


@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize("lengths", [[3, 3, 3, 2, 2, 1, 3, 3], [4] * 8, [1, 4, 2, 3, 4, 1, 2, 2]], ids=str)
def test_a_share_of_equally_long_sequences_draws_its_rows_of_the_whole_batchs(world, lengths):
    # in float32 torch unpacks such a share, and draws with a dimension of time
    torch.manual_seed(0)
    reader, rows, lengths = Reader(), torch.randn(8, 4, 3), torch.tensor(lengths)
    torch.manual_seed(1)
    expected = reader(rows, lengths)
    model = samestep.replicate(reader, same=True)
    loader = samestep.loader(TensorDataset(rows, lengths, torch.arange(8)), 8)
    for some, their_lengths, numbers in loader:
        torch.manual_seed(1)
        torch.testing.assert_close(model(some, their_lengths), expected[numbers])
