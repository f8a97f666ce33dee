"""The tree over microbatches: the same additions, whoever holds which of them."""

import math

import pytest
import torch

from samestep.train.group.census import added
from samestep.train.model import tree as tree_file
from samestep.train.model.tree import _buckets, layout


def tree(values):
    """The sum by its definition: the left part is the largest power of two that leaves something for the right."""
    if len(values) == 1:
        return values[0]
    left = 1 << (len(values) - 1).bit_length() - 1
    return tree(values[:left]) + tree(values[left:])


@pytest.mark.parametrize("count", range(1, 40))
def test_what_the_ranks_keep_adds_up_as_the_tree_at_any_size(count):
    generator = torch.Generator(torch.get_default_device()).manual_seed(count)
    scale = 10.0 ** torch.arange(count).remainder(9)
    leaves = (torch.randn(count, generator=generator, dtype=torch.float64) * scale).tolist()
    for size in range(1, count + 1):
        held = {
            (level, number): tree(leaves[number << level : (number + 1) << level])
            for blocks in layout(count, size)
            for level, number in blocks
        }
        assert list(added(held, count, float.__add__).values()) == [tree(leaves)]


@pytest.mark.parametrize("count", [1, 5, 8, 64, 1000])
def test_what_a_rank_keeps_is_at_most_two_sums_for_each_power_of_two(count):
    for size in (1, 2, 3, 4, 7):
        for rank, blocks in enumerate(layout(count, size)):
            held = sum(1 << level for level, _ in blocks)
            assert len(blocks) <= 2 * max(1, math.ceil(math.log2(held + 1))), (rank, blocks)
        if size & (size - 1) == 0 and count % size == 0 and (count // size) & (count // size - 1) == 0:
            assert all(len(blocks) == 1 for blocks in layout(count, size))


def test_a_bucket_holds_neighbours_of_one_type_as_far_as_there_is_room(monkeypatch):
    monkeypatch.setattr(tree_file, "_BUCKET_BYTES", 100)
    single = [torch.zeros(10), torch.zeros(15), torch.zeros(1)]
    double = [torch.zeros(1, dtype=torch.float64), torch.zeros(50, dtype=torch.float64)]
    assert _buckets([*single, *double, *single]) == [(0, 2), (2, 3), (3, 4), (4, 5), (5, 7), (7, 8)]
