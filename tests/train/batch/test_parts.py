import torch

from samestep.train.batch.parts import Part
from samestep.train.passes import Rows


def test_only_rows_in_one_piece_are_drawn_alone():
    rows = Rows(2, 1, 7)
    assert Part(0, rows).beside(torch.empty(2, 5)) == (5, 20)
    assert Part(1, rows).beside(torch.empty(5, 2)) is None
    assert Part(0, rows).beside(torch.empty(5, 2).t()) is None
    assert Part(0, rows).beside(torch.empty(4, 5)) is None  # two batches after each other
    assert Part(0, rows, chosen=torch.tensor([1, 3])).beside(torch.empty(2, 5)) is None
