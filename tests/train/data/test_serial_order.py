"""Without a seed the order is the one that torch's DataLoader would have drawn from the script's stream."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, WeightedRandomSampler

import samestep

DATA = TensorDataset(torch.arange(15))


class Numbers(Dataset):
    def __len__(self):
        return 15

    def __getitem__(self, index):
        return torch.tensor(index)


def walk(train, test, epochs=3):
    """What is taken, with draws of the script's own between and inside the passes."""
    torch.manual_seed(4)
    taken = []
    for _ in range(epochs):
        for batch in train:
            rows = batch[0] if isinstance(batch, list) else batch
            taken += [sorted(samestep.gather(rows).tolist()), torch.rand(2, 3).tolist()]
        taken.append(torch.rand(1).item())
        taken += [len(list(test)) > 0, np.random.rand() >= 0, torch.rand(1).item()]
    return taken


def serially(make, **options):
    """The same with torch's DataLoader on the whole batches."""
    torch.manual_seed(4)
    taken = []
    train, test = make(DataLoader, **options), DataLoader(DATA, 5)
    for _ in range(3):
        for batch in train:
            rows = batch[0] if isinstance(batch, list) else batch
            taken += [sorted(rows.tolist()), torch.rand(2, 3).tolist()]
        taken.append(torch.rand(1).item())
        taken += [len(list(test)) > 0, True, torch.rand(1).item()]
    return taken


@pytest.mark.parametrize(
    "options",
    [{}, {"num_workers": 0}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}],
    ids=["default", "0-workers", "1-worker", "kept-worker"],
)
@pytest.mark.parametrize("data", [DATA, Numbers()], ids=["memory", "items"])
def test_batches_and_the_scripts_own_draws_are_those_of_the_serial_script(world, data, options):
    def make(loader, **options):
        return loader(data, batch_size=4, shuffle=True, **options)

    mine = walk(make(samestep.loader, **options), samestep.loader(DATA, 5))
    assert mine == serially(make, **options)


def test_two_loaders_in_a_zip_draw_in_the_serial_scripts_order(world):
    def pairs(loader):
        torch.manual_seed(1)
        first, second = (loader(DATA, batch_size=4, shuffle=True) for _ in range(2))
        return [
            (sorted(x.tolist()), sorted(y.tolist())) for (x,), (y,) in zip(first, second, strict=True)
        ], torch.rand(1)

    mine, drawn = pairs(samestep.loader)
    mine = [tuple(sorted(samestep.gather(part)) for part in pair) for pair in mine]
    expected, drawn_serially = pairs(DataLoader)
    assert mine == expected
    assert torch.equal(drawn, drawn_serially)


def test_a_sampler_draws_from_the_scripts_stream(world):
    weights = torch.arange(1.0, 16.0)

    def make(loader):
        return loader(DATA, batch_size=4, sampler=WeightedRandomSampler(weights, 15))

    assert walk(make(samestep.loader), samestep.loader(DATA, 5)) == serially(make)


class Wandering:
    """Draws for each sample when it is asked for it."""

    def __len__(self):
        return 15

    def __iter__(self):
        return (int(torch.randint(15, ())) for _ in range(15))


@pytest.mark.sizes(1)
def test_a_sampler_that_draws_for_each_sample_draws_when_torchs_dataloader_lets_it(world):
    def make(loader):
        return loader(DATA, batch_size=4, sampler=Wandering())

    assert walk(make(samestep.loader), samestep.loader(DATA, 5)) == serially(make)


class InBlocks:
    """Draws for a thousand samples when it is asked for the first of them."""

    def __init__(self, length):
        self.length, self.taken = length, 0

    def __len__(self):
        return self.length

    def __iter__(self):
        for _ in range(0, self.length, 1000):
            for index in torch.randint(min(self.length, 10**6), (1000,)).tolist():
                self.taken += 1
                yield index


class Squares(Dataset):
    def __len__(self):
        return 10**8

    def __getitem__(self, index):
        return torch.tensor(index * index)


def test_a_sampler_of_1e8_samples_is_taken_as_far_as_batches_need_it(world):
    sampler = InBlocks(10**8)
    assert len(next(iter(samestep.loader(Squares(), batch_size=8, sampler=sampler, num_workers=0)))) > 0
    assert sampler.taken < 10**6


def test_a_sampler_longer_than_what_is_asked_at_once_draws_the_serial_scripts_order(world):
    data = TensorDataset(torch.arange(140_000))

    def passes(loader):
        torch.manual_seed(3)
        batches = loader(data, batch_size=30_000, sampler=InBlocks(140_000), num_workers=0)
        taken = [samestep.gather(rows) for _ in range(2) for (rows,) in batches]
        return [hash(tuple(rows.tolist())) for rows in taken], torch.rand(1).item()

    mine = passes(samestep.loader)
    torch.manual_seed(3)
    order, sampler = [], InBlocks(140_000)
    for _ in range(2):
        torch.empty((), dtype=torch.int64).random_()  # the seed that a new iterator of DataLoader draws
        indices = list(sampler)
        order += [hash(tuple(indices[at : at + 30_000])) for at in range(0, 140_000, 30_000)]
    assert mine == (order, torch.rand(1).item())


def test_a_batch_sampler_without_end_sees_what_the_loop_has_collected(world):
    memory = list(range(4))

    class Replay:
        def __iter__(self):
            while True:
                yield [len(memory) - 1, *torch.randint(len(memory), (3,)).tolist()]

    batches = iter(samestep.loader(memory, batch_sampler=Replay(), num_workers=0))
    for newest in range(3, 8):
        drawn = samestep.gather(next(batches)).tolist()
        assert drawn[0] == newest
        assert max(drawn) == newest
        memory.append(newest + 1)


def test_a_sampler_that_follows_each_ranks_losses_is_an_error_at_the_end_of_the_pass(world):
    data = TensorDataset(torch.arange(140_000))
    model = samestep.replicate(torch.nn.Linear(1, 1))  # so that it is a pass of training

    class Following(InBlocks):
        def __iter__(self):
            self.at = 0
            for at in range(self.length):
                yield (at + self.at) % self.length

    sampler = Following(140_000)

    def follow():
        assert model.training
        for (rows,) in samestep.loader(data, batch_size=30_000, sampler=sampler, num_workers=0):
            sampler.at = int(rows[0]) + 1

    if world.size == 1:
        follow()
        return
    with pytest.raises(samestep.RanksDiffer, match=r"gives rank . another order than rank"):
        follow()


def test_a_sampler_with_a_generator_of_its_own_goes_on_in_it(world):
    def make(loader):
        generator = torch.Generator().manual_seed(7)
        sampler = torch.utils.data.RandomSampler(DATA, generator=generator)
        return loader(DATA, batch_size=4, sampler=sampler)

    assert walk(make(samestep.loader), samestep.loader(DATA, 5)) == serially(make)


def test_rank_0s_stream_decides_and_the_other_ranks_draw_apart(world):
    torch.manual_seed(0)
    expected = [rows.tolist() for (rows,) in DataLoader(DATA, batch_size=4, shuffle=True)]
    torch.manual_seed(world.rank)
    loader = samestep.loader(DATA, 4, shuffle=True)
    assert [sorted(samestep.gather(rows).tolist()) for (rows,) in loader] == list(map(sorted, expected))


@pytest.mark.parametrize("sampler", [False, True])
def test_the_drawn_order_is_in_the_state(world, sampler):
    def make():
        order = WeightedRandomSampler(torch.ones(15), 15) if sampler else None
        return samestep.loader(DATA, 4, shuffle=not sampler, **({"sampler": order} if sampler else {}))

    torch.manual_seed(3)
    whole, state = [], {}
    first = make()
    for epoch in first.epochs(3):
        for step, (rows,) in enumerate(first):
            whole.append(rows.tolist())
            if (epoch, step) == (1, 1):
                state, streams = first.state_dict(), torch.get_rng_state()
    torch.manual_seed(99)
    second = make()
    second.load_state_dict(state)
    torch.set_rng_state(streams)
    assert [rows.tolist() for _ in second.epochs(3) for (rows,) in second] == whole[6:]


def test_a_seed_leaves_the_scripts_stream_alone_and_gives_its_order(world):
    before = torch.get_rng_state()
    orders = [[rows.tolist() for (rows,) in samestep.loader(DATA, 4, shuffle=True, seed=3)] for _ in range(2)]
    assert orders[0] == orders[1]
    assert torch.equal(torch.get_rng_state(), before)


def test_a_subset_drawn_from_the_scripts_stream_is_the_serial_one(world):
    def rows(loader):
        torch.manual_seed(2)
        part, _ = torch.utils.data.random_split(DATA, [9, 6])
        return [x.tolist() for (x,) in loader(part, batch_size=3, shuffle=True)]

    mine = [sorted(samestep.gather(batch)) for batch in rows(samestep.loader)]
    assert mine == list(map(sorted, rows(DataLoader)))
    assert isinstance(torch.utils.data.random_split(DATA, [9, 6])[0], Subset)


class Collected(Dataset):
    """A replay memory: what the loop adds is there from the next pass on."""

    def __init__(self):
        self.samples = list(range(11))

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return torch.tensor(self.samples[index])


class AllButFour:
    """A curriculum: more of the data in each pass."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data) - 4

    def __iter__(self):
        return iter(torch.randperm(len(self.data))[: len(self)].tolist())


WAYS = {
    "shuffled": lambda data: {"shuffle": True},
    "in order": lambda data: {},
    "by a sampler": lambda data: {"sampler": AllButFour(data)},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_pass_has_what_the_loop_has_added_before_it(world, way):
    def taken(loader):
        torch.manual_seed(4)
        data = Collected()
        train = loader(data, batch_size=4, **WAYS[way](data))
        passes = []
        for _ in range(3):
            batches = [samestep.gather(rows) if loader is samestep.loader else rows for rows in train]
            passes += [len(train), *(sorted(whole.tolist()) for whole in batches)]
            data.samples += range(100, 108)
        return passes, torch.rand(1).item()

    assert taken(samestep.loader) == taken(DataLoader)


@pytest.mark.parametrize("way", ["shuffled", "in order"])
def test_a_pass_is_resumed_with_the_samples_that_it_began_with(world, way):
    def begun():
        data = Collected()
        return data, samestep.loader(data, batch_size=4, **WAYS[way](data))

    torch.manual_seed(4)
    data, train = begun()
    batches = iter(train)
    next(batches)
    data.samples += range(100, 110)
    state = train.state_dict()
    rest = [samestep.gather(rows).tolist() for rows in batches]
    data, again = begun()
    with pytest.raises(samestep.UsageError, match="length is"):
        again.load_state_dict(state)
    data.samples += range(100, 110)
    again.load_state_dict(state)
    assert [samestep.gather(rows).tolist() for rows in again] == rest


def test_tensors_that_a_data_set_is_given_are_those_of_the_next_pass(world):
    data = TensorDataset(torch.arange(6))
    train = samestep.loader(data, batch_size=3)
    assert [samestep.gather(x).tolist() for (x,) in train] == [[0, 1, 2], [3, 4, 5]]
    data.tensors = (torch.arange(10, 16),)
    assert [samestep.gather(x).tolist() for (x,) in train] == [[10, 11, 12], [13, 14, 15]]
