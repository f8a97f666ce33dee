"""What the ranks of a loader have in common: its batches, and samples that are compared before the first of them."""

from contextlib import nullcontext, redirect_stderr
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

import samestep
from samestep import RanksDiffer
from samestep.train.data.source import chosen


def error_where_ranks_differ(world, match):
    return nullcontext() if world.size == 1 else pytest.raises(RanksDiffer, match=match)


def test_a_split_that_each_rank_drew_for_itself_is_an_error_on_all_of_them(world):
    drawn = torch.from_numpy(np.random.default_rng(world.rank).permutation(12)[:9])
    other = (
        r"loader got other samples on rank \d than on rank \d: the indices of a Subset or the labels differ; "
        r"seed what draws them"
    )
    for split in (Subset(range(12), drawn), TensorDataset(drawn)):
        with error_where_ranks_differ(world, other):
            samestep.loader(ConcatDataset([range(3), split]), 4)


def test_floats_that_each_rank_drew_for_itself_are_said(world):
    apart, said = torch.full((9, 2), float(world.rank)), StringIO()
    with redirect_stderr(said):
        samestep.loader(TensorDataset(torch.ones(9, 2)), 4)
        assert said.getvalue() == ""
        samestep.loader(Subset(TensorDataset(apart, torch.zeros(9)), range(4)), 4)
    expected = "the samples of samestep.loader differ between rank 0 and rank 1"
    assert (expected in said.getvalue()) == (world.rank == 0 and world.size > 1)


class Own(Dataset):
    def __init__(self, rows, names=()):
        self.rows, self.names, self.cache = rows, list(names), [None] * len(rows)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        self.cache[i] = torch.full((2,), float(samestep.init().rank))
        return self.rows[i]


class Wrapper(Dataset):
    def __init__(self, base):
        self.base = base

    def __len__(self):
        return len(self.base)

    def __getitem__(self, i):
        return self.base[i]


def test_numbers_that_a_dataset_of_the_users_drew_for_itself_are_said_and_what_its_use_changes_is_not(world):
    rank = float(world.rank)
    alike = Own(np.ones((6, 2)), [f"/node{world.rank}/{i}.png" for i in range(6)])
    files = [Path(f"/data/{i}.png") for i in range(18)][world.rank :: 3][
        :6
    ]  # split by rank, beside the loader
    apart = [Own(np.full((6, 2), rank)), Wrapper(Own(torch.full((6, 2), rank))), [(rank, "a")] * 6]
    apart += [Own(files), Own([str(file) for file in files])]
    said = StringIO()
    with redirect_stderr(said):
        for _ in samestep.loader(alike, 4):
            samestep.loader(alike, 4)
        samestep.loader(Wrapper(alike), 4)
        assert said.getvalue() == ""
    for dataset in apart:
        _, digest = chosen(dataset)
        digests = samestep.gather([digest])
        assert len(set(digests)) == world.size


def test_samples_that_each_rank_has_added_for_itself_are_an_error_on_all_of_them(world):
    data = list(range(9))
    train = samestep.loader(data, 4, shuffle=True)
    list(train)
    data += range(world.rank + 1)
    with error_where_ranks_differ(
        world, r"a loader has 1\d samples on rank \d and 1\d on rank \d; add the same"
    ):
        list(train)


def test_a_split_that_all_ranks_drew_alike_is_shared(world):
    drawn = torch.randperm(12, generator=torch.Generator().manual_seed(0))[:9]
    for indices in (drawn, drawn.tolist(), drawn.numpy(), list(drawn), range(9), ["a", None]):
        assert len(samestep.loader(Subset(range(12), indices), 4).dataset) == len(indices)


def test_for_a_weak_measurement_every_rank_has_a_whole_batch(world, monkeypatch):
    monkeypatch.setenv("SAMESTEP_WEAK", "1")  # what `samestep scale --weak` sets
    batches = list(samestep.loader(range(24), 4, shuffle=False))
    assert [len(batch) for batch in batches] == [4] * (24 // 4 // world.size)
    monkeypatch.delenv("SAMESTEP_WEAK")
    assert sum(len(batch) for batch in samestep.loader(range(24), 6)) == 24 // world.size


@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize("length", [13, 15])
def test_an_evaluation_that_computes_gradients_says_where_its_last_batches_are_other_ones(world, length):
    model = samestep.replicate(torch.nn.Linear(2, 1)).eval()
    with redirect_stderr(StringIO()) as said:
        for x in samestep.loader(torch.ones(length, 2), 6):
            model(x).mean().backward()
    is_other = length == 13 and world.rank == 0
    ours = {2: "5 and 2", 3: "4 and 3"}[world.size]
    expected = f"ends with batches of {ours} samples, and the serial script's with 6 and 1"
    assert (expected in said.getvalue()) == is_other
    assert bool(said.getvalue()) == is_other


@pytest.mark.sizes(2, 3)
def test_an_evaluation_that_derives_by_its_samples_says_nothing_of_its_last_batches(world):
    model = samestep.replicate(torch.nn.Linear(2, 1)).eval()
    with redirect_stderr(StringIO()) as said:
        for x in samestep.loader(torch.ones(13, 2), 6):
            model(x.clone().requires_grad_()).mean().backward()
    assert not said.getvalue()
