"""Samples of a step are a function of length, seed, epoch and step; ranks share them evenly."""

import random

import pytest
import torch

from samestep import UsageError
from samestep.train import passes
from samestep.train.data import share

CASES = 10_000


def cases(count, seed):
    """Lengths, batch sizes, sizes and starts, small ones above all, for there the edges are."""
    draw = random.Random(seed)
    for _ in range(count):
        size = draw.choice([1, 2, 3, 4, 5, 6, 7, 8, 13, 16, 33])
        batch_size = size + draw.choice([0, 0, 1, 2, 3, draw.randrange(40)])
        length = draw.choice(
            [0, 1, size - 1, size, size + 1, batch_size, batch_size + 1, draw.randrange(400)]
        )
        yield length, batch_size, size, draw


def check(length, batch_size, size, *, drop_last, even, start):
    """The batches [(start, stop)] of all ranks, after what has to hold for each was found to hold."""
    arguments = {"drop_last": drop_last, "even": even, "start": start}
    ranks = [list(share.Pieces(length, batch_size, size, rank, **arguments)) for rank in range(size)]
    for together in zip(*ranks, strict=True):
        assert len({(piece.start, piece.stop) for piece in together}) == 1
        ends = [together[0].start, *(piece.mine_stop for piece in together)]
        assert [piece.mine_start for piece in together] == ends[:-1]
        assert ends[-1] == together[0].stop
        shares = [piece.mine for piece in together]
        assert max(shares) - min(shares) <= 1
        assert shares == sorted(shares, reverse=True)
        assert sum(shares) == together[0].all
        parts = sum(share.weight(piece, length, batch_size) for piece in together)
        assert even or abs(parts - 1) < 1e-9
    return [(piece.start, piece.stop) for piece in ranks[0]]


@pytest.mark.slow
def test_ranks_together_take_exactly_the_serial_batches():
    for length, batch_size, size, draw in cases(CASES, 0):
        drop_last = draw.random() < 0.3
        serial = [
            (at, min(at + batch_size, length))
            for at in range(0, length, batch_size)
            if not drop_last or at + batch_size <= length
        ]
        assert check(length, batch_size, size, drop_last=drop_last, even=False, start=0) == serial


@pytest.mark.slow
def test_evaluation_covers_every_sample_once_and_leaves_no_rank_without():
    for length, batch_size, size, _ in cases(CASES, 1):
        pieces = share.Pieces(length, batch_size, 1, 0, start=0, drop_last=False, even=True)
        parts = sum(share.weight(piece, length, batch_size) for piece in pieces)
        assert abs(parts - -(-length // batch_size)) < 1e-9  # of the serial script's batches
        batches = check(length, batch_size, size, drop_last=False, even=True, start=0)
        assert [at for start, stop in batches for at in range(start, stop)] == list(range(length))
        if length >= size:
            assert all(stop - start >= size for start, stop in batches)
        assert all(stop - start <= batch_size for start, stop in batches[:-1])
        # what is filled from the batch before is one with it only where two would leave a rank without
        assert all(stop - start <= batch_size or stop - start < 2 * size for start, stop in batches[-1:])


def test_an_epoch_of_many_batches_is_cut_as_it_is_taken():
    many = share.Pieces(10**12, 4, 3, 1, start=0, drop_last=False, even=True)
    assert len(many) == 250_000_000_000
    assert next(iter(many)) == share.Piece(0, 4, 2, 3)
    assert many[-1] == share.Piece(10**12 - 4, 10**12, 10**12 - 2, 10**12 - 1)


def test_going_on_from_any_batch_gives_the_same_rest_at_any_size():
    for length, batch_size, size, draw in cases(CASES // 5, 2):
        drop_last, even = draw.random() < 0.3, draw.random() < 0.3
        whole = check(length, batch_size, size, drop_last=drop_last, even=even, start=0)
        for at in draw.sample(range(len(whole)), min(3, len(whole))):
            stop = whole[at][1]
            other = size if even else draw.choice([1, 2, 3, 5, 8])
            rest = check(length, batch_size, other, drop_last=drop_last, even=even, start=stop)
            assert rest == whole[at + 1 :]


def test_the_order_is_a_permutation_that_depends_on_seed_and_epoch_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    seen = set()
    for seed in range(10):
        for epoch in range(10):
            order = share.order(50, seed, epoch, shuffle=True)
            assert sorted(order.tolist()) == list(range(50))
            assert torch.equal(order, share.order(50, seed, epoch, shuffle=True))
            seen.add(tuple(order.tolist()))
    assert len(seen) == 100
    assert share.order(5, 1, 1, shuffle=False).tolist() == list(range(5))
    assert share.order(0, 1, 1, shuffle=True).tolist() == []
    assert torch.equal(torch.get_rng_state(), before)


def test_the_order_of_a_seed_stays_what_it_was_in_earlier_releases():
    assert share.order(8, 0, 0, shuffle=True).tolist() == [3, 4, 7, 6, 0, 1, 2, 5]


def test_cuts_are_contiguous_and_even():
    for count in range(40):
        for size in range(1, 12):
            cuts = [passes.cut(count, size, rank) for rank in range(size)]
            assert [start for start, _ in cuts] == [0, *(stop for _, stop in cuts)][:-1]
            assert cuts[-1][1] == count


@pytest.mark.parametrize(
    ("batch_size", "size", "message"),
    [
        (4, 6, "batch_size 4 is smaller than the 6 ranks that share it; use at least 6, or fewer processes"),
        (0, 1, "batch_size 0 is not a number of samples; use an integer of at least 1"),
        (-2, 1, "batch_size -2 is not"),
        (2.0, 1, "batch_size 2.0 is not"),
        (True, 1, "batch_size True is not"),
        (None, 1, "batch_size None is not"),
    ],
)
def test_a_batch_size_that_cannot_be_is_named(batch_size, size, message):
    with pytest.raises(UsageError) as raised:
        share.check_batch_size(batch_size, size)
    assert str(raised.value).startswith(message)
