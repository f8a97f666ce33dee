"""A sampler's order is found again in the middle of an epoch, whatever the sampler draws from."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import samestep
from samestep import RanksDiffer, UsageError

DATA = TensorDataset(torch.arange(12))


class Sampler:
    """Shuffles with a generator of its own, and goes on from its last pass."""

    def __init__(self):
        self.own = random.Random(3)

    def __len__(self):
        return 12

    def __iter__(self):
        order = list(range(12))
        self.own.shuffle(order)
        return iter(order)


class Stateful(Sampler):
    """Its passes are no function of how often it was walked through."""

    def state_dict(self):
        return {"own": [list(self.own.getstate()[1]), random.random()]}

    def load_state_dict(self, state):
        self.own.setstate((3, tuple(state["own"][0]), None))


class ByEpoch(Sampler):
    def set_epoch(self, epoch):
        self.own = random.Random(epoch)


def left(sampler, epoch=None):
    """What three epochs take, or the state after two batches of one of them and what was still to take."""
    loader = samestep.loader(DATA, 4, sampler=sampler)
    taken, state = [], None
    for now in loader.epochs(3):
        for step, (x,) in enumerate(loader, 1):
            taken.append(sorted(samestep.gather(x).tolist()))
            if (now, step) == (epoch, 2):
                state = loader.state_dict()
                taken = []
    return taken, state


def resumed(sampler, state):
    loader = samestep.loader(DATA, 4, sampler=sampler)
    loader.load_state_dict(state)
    return [sorted(samestep.gather(x).tolist()) for _ in loader.epochs(3) for (x,) in loader]


@pytest.mark.parametrize("kind", [Sampler, Stateful, ByEpoch])
def test_the_rest_of_an_epoch_and_those_after_it_are_the_undisturbed_ones(world, kind):
    whole, _ = left(kind())
    assert len({tuple(map(tuple, whole[at : at + 3])) for at in (0, 3, 6)}) == 3
    for epoch in range(3):
        rest, state = left(kind(), epoch)
        assert rest == whole[3 * epoch + 2 :]
        assert resumed(kind(), state) == rest


def test_a_script_that_sets_the_epoch_of_its_sampler_decides_it(world):
    def epochs(start):
        order = DistributedSampler(DATA, 1, 0, seed=4)
        train = samestep.loader(DATA, 4, sampler=order)
        for epoch in range(start, 3):
            order.set_epoch(epoch)
            yield [sorted(samestep.gather(x).tolist()) for (x,) in train]

    def by_loader():
        train = samestep.loader(DATA, 4, sampler=DistributedSampler(DATA, 1, 0, seed=4))
        return [[sorted(samestep.gather(x).tolist()) for (x,) in train] for _ in range(3)]

    assert list(epochs(2)) == list(epochs(0))[2:]
    assert list(epochs(0)) == by_loader()


@pytest.mark.sizes(1)
def test_a_sampler_that_draws_when_it_is_asked_goes_on_in_the_scripts_stream(world):
    class Asked(Sampler):
        def __iter__(self):
            return (random.randrange(12) for _ in range(12))

    random.seed(0)
    loader, taken = samestep.loader(DATA, 4, sampler=Asked()), []
    for _ in loader.epochs(3):
        for (x,) in loader:
            taken.append(x.tolist())
            if len(taken) == 1:
                state, stream = loader.state_dict(), random.getstate()
    random.setstate(stream)
    other = samestep.loader(DATA, 4, sampler=Asked())
    other.load_state_dict(state)
    assert [x.tolist() for _ in other.epochs(3) for (x,) in other] == taken[1:]


def test_what_a_sampler_draws_is_not_missing_in_the_scripts_own_streams(world):
    class Drawing(Sampler):
        def __iter__(self):
            self.drawn = torch.rand(3), random.random(), np.random.rand()
            return iter(range(12))

    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1]
    for _ in samestep.loader(DATA, 4, sampler=Drawing(), seed=0):
        pass
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert (np.random.get_state()[1] == before[2]).all()


def test_a_sampler_that_gives_another_order_than_before_is_an_error(world):
    class Fresh(Sampler):
        def __init__(self, seed):
            self.own = random.Random(seed)

    _, state = left(Fresh(1), 1)
    with pytest.raises(UsageError, match="the sampler gives epoch 2 another order than before the run"):
        resumed(Fresh(2), state)


class Gives:
    def __init__(self, given, length):
        self.given, self.length = given, length

    def __len__(self):
        return self.length

    def __iter__(self):
        return iter(self.given)


def test_a_sampler_that_gives_no_order_of_its_length_is_an_error_and_no_other_training(world):
    for given, message in (
        (range(9), r"Gives, yielded 9 samples but its len\(\) is 12; make them agree"),
        (range(15), r"Gives, yielded 15 samples but its len\(\) is 12"),
        (
            [[0, 1, 2]] * 12,
            r"Gives, yielded a list, which is not the index of a sample; let it yield integers, or pass batches as",
        ),
    ):
        loader = samestep.loader(DATA, 4, sampler=Gives(given, 12))
        with pytest.raises(UsageError, match=message):
            list(loader)
    with pytest.raises(UsageError, match=r"sampler, list_iterator, without length; give it a __len__"):
        samestep.loader(DATA, 4, sampler=iter([1]))
    for given in (torch.arange(12), list(torch.arange(12)), torch.arange(12).numpy()):
        assert len(list(samestep.loader(DATA, 12, sampler=Gives(given, 12)))) == 1


def test_samplers_that_choose_by_rank_are_an_error_when_training_begins(world):
    model = samestep.replicate(torch.nn.Linear(1, 1))
    loaders = {
        "DistributedSampler": samestep.loader(
            DATA, 4, sampler=DistributedSampler(DATA, world.size, world.rank)
        ),
        "Gives": samestep.steps(DATA, 4, microbatch=1, sampler=Gives(torch.arange(12).roll(world.rank), 12)),
    }
    for name, loader in loaders.items():
        if world.size > 1:
            with pytest.raises(
                RanksDiffer, match=rf"sampler, {name}, gives rank \d another order than rank \d"
            ):
                next(iter(loader))
        model.eval()
        with torch.no_grad():
            assert list(loader)
        model.train()
    alike = samestep.loader(DATA, 4, sampler=Gives(torch.arange(12).flip(0), 12))
    assert samestep.sum(sum(len(x) for (x,) in alike)) == 12


class Batches:
    """Batches of unlike sizes, drawn when they are asked for or, if it is eager, all at once."""

    def __init__(self, eager=False):
        self.eager, self.own = eager, random.Random(3)

    def __iter__(self):
        drawn = self.drawn()
        return iter(list(drawn)) if self.eager else drawn

    def drawn(self):
        order = torch.randperm(12).tolist()
        self.own.shuffle(order)
        for at in (0, 1, 4, 5, 11):
            size = {0: 1, 1: 3, 4: 1, 5: 6, 11: 1}[at]
            yield order[at : at + size]

    def __len__(self):
        return 5


def of_batches(batch_sampler, loader=samestep.loader, **options):
    return loader(DATA, batch_sampler=batch_sampler, **options)


def in_batches(loader):
    return [x.tolist() for (x,) in loader]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("eager", [False, True])
def test_a_batch_samplers_batches_are_those_of_the_step_and_drawn_as_by_torch(world, eager, workers):
    # beside a model passes are training, and ranks without a share are lent the batch
    model = samestep.replicate(torch.nn.Linear(1, 1))
    torch.manual_seed(3)
    serial = of_batches(Batches(eager), DataLoader, num_workers=workers)
    expected = [in_batches(serial), in_batches(serial), torch.rand(1).item()]
    for loader in (
        of_batches(Batches(eager), num_workers=workers),
        samestep.loader(of_batches(Batches(eager), DataLoader, num_workers=workers)),
    ):
        assert len(loader) == 5
        torch.manual_seed(3 if not world.rank else 99)
        found, weights = [], []
        for _ in range(2):
            found.append([])
            for (x,) in loader:
                found[-1].append(samestep.gather(x).tolist())
                weights.append(samestep.sum(loader.share))
                model(x[:, None].float()).sum().backward()
        assert found == expected[:2]
        assert weights == pytest.approx([1.0] * 10)
        assert world.rank or torch.rand(1).item() == expected[2]


def test_batches_of_one_sample_come_once_in_an_evaluation(world):
    with torch.no_grad():
        seen = samestep.gather([int(sample) for (x,) in of_batches(Batches()) for sample in x])
    assert sorted(seen) == list(range(12))


@pytest.mark.parametrize("seed", [None, 4])
@pytest.mark.parametrize("eager", [False, True])
def test_a_batch_sampler_goes_on_at_any_batch(world, eager, seed):
    model = samestep.replicate(torch.nn.Linear(1, 1))
    assert model.training
    torch.manual_seed(8)
    loader, taken, states = of_batches(Batches(eager), seed=seed), [], []
    for _ in loader.epochs(3):
        for (x,) in loader:
            taken.append(samestep.gather(x).tolist())
            states.append((loader.state_dict(), torch.get_rng_state()))
    for at in (1, 7, 9, 10):
        state, stream = states[at - 1]
        other = of_batches(Batches(eager), seed=seed)
        other.load_state_dict(state)
        torch.set_rng_state(stream)
        assert [samestep.gather(x).tolist() for _ in other.epochs(3) for (x,) in other] == taken[at:]


def test_a_batch_sampler_that_is_none_is_a_sentence(world):
    for given, message in (
        (
            range(12),
            "the batch_sampler, range, yielded 0, which is not a batch; let it yield lists of indices",
        ),
        ([[0], []], r"list, yielded \[\], which is not a batch"),
        ([["a"]], "yielded a str, which is not the index of a sample"),
    ):
        with pytest.raises(UsageError, match=message):
            list(of_batches(given))
    for options, what in (
        ({"batch_size": 4}, "batch_size"),
        ({"shuffle": True}, "shuffle"),
        ({"drop_last": True}, "drop"),
    ):
        with pytest.raises(
            UsageError, match=rf"loader got a batch_sampler and {what}\w*; the batch_sampler makes"
        ):
            of_batches(Batches(), **options)
    with pytest.raises(UsageError, match="steps needs to know the batches"):
        samestep.steps(DATA, 4, microbatch=1, batch_sampler=Batches())
    with pytest.raises(TypeError, match="no len"):
        len(of_batches(batch for batch in [[1]]))


def test_a_state_that_was_just_loaded_is_the_state(world):
    """A run that is stopped after it resumed and before its first step commits what it found."""
    for options in ({"shuffle": True}, {"sampler": Sampler()}):
        loader = samestep.loader(DATA, 4, **options)
        batches = iter(loader)
        next(batches)
        state = loader.state_dict()
        other = samestep.loader(DATA, 4, **options)
        other.load_state_dict(state)
        assert other.state_dict() == state


def test_after_a_resume_an_evaluation_that_was_over_begins_anew_and_draws_as_in_the_undisturbed_run(world):
    data = TensorDataset(torch.arange(11))

    def evaluated(loader):
        with torch.no_grad():
            return sorted(samestep.gather([int(sample) for (x,) in loader for sample in x]))

    torch.manual_seed(3)
    loader = samestep.loader(data, 4)
    assert evaluated(loader) == list(range(11))
    state, stream = loader.state_dict(), torch.get_rng_state()
    assert evaluated(loader) == list(range(11))
    drawn = torch.rand(1)
    other = samestep.loader(data, 4)
    other.load_state_dict(state)
    torch.set_rng_state(stream)
    assert evaluated(other) == list(range(11))
    assert torch.rand(1) == drawn
    assert other.epoch == loader.epoch
    once = samestep.loader(data, 4)
    assert [evaluated(once) for _ in once.epochs(1)] == [list(range(11))]
    assert list(once.epochs(1)) == []
