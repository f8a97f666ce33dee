"""A stream is shared exactly: torch's own batches, in its order, at any number of ranks and after a resume."""

import random
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

import samestep
from samestep import RanksDiffer, UsageError
from samestep.train import streams
from samestep.train.data import stream


class Rows(IterableDataset):
    """Its workers take turns, as torch's documentation shows it."""

    def __init__(self, count=23):
        self.count = count

    def __iter__(self):
        worker = get_worker_info()
        first, every = (worker.id, worker.num_workers) if worker else (0, 1)
        for index in range(first, self.count, every):
            yield {"row": torch.tensor(float(index)), "name": f"sample {index}"}


class Shuffled(Rows):
    """Through a buffer, and with noise: every draw is from a stream of the process."""

    def __iter__(self):
        held = []
        for sample in super().__iter__():
            held.append({"row": sample["row"] + np.random.rand() * torch.rand(()), "name": sample["name"]})
            if len(held) == 5:
                yield held.pop(random.randrange(5))
        yield from held


class Counted(Rows):
    def __len__(self):
        return self.count


def joined(batches):
    """What all ranks were given, batch by batch."""
    return [(samestep.gather(batch["row"]).tolist(), samestep.gather(batch["name"])) for batch in batches]


def serially(batches):
    return [(batch["row"].tolist(), batch["name"]) for batch in batches]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(
    ("kind", "workers"),
    [
        (Rows, 0),
        (Rows, 2),
        (Shuffled, 0),
        pytest.param(Shuffled, 1, marks=pytest.mark.slow),
        pytest.param(Shuffled, 2, marks=pytest.mark.slow),
    ],
)
def test_batches_are_those_of_torchs_dataloader(world, kind, workers, drop_last):
    options = {"batch_size": 4, "num_workers": workers, "drop_last": drop_last}

    def seed(number):
        for seeds in (torch.manual_seed, random.seed, np.random.seed):
            seeds(number)

    def drawn():
        return [torch.rand(2).tolist(), random.random(), np.random.rand()]

    seed(5)
    serial = DataLoader(kind(), **options)
    expected = [serially(serial), serially(serial), drawn()]
    for loader in (samestep.loader(kind(), **options), samestep.loader(DataLoader(kind(), **options))):
        seed(5 if not world.rank else 99)
        found = [joined(loader), joined(loader), drawn()]
        assert found[: 2 + (not world.rank)] == expected[: 2 + (not world.rank)]


def test_with_a_seed_a_streams_draws_are_a_function_of_it_and_leave_the_scripts_own_alone(world):
    def passes(stream, seed):
        torch.manual_seed(world.rank)
        random.seed(1)
        np.random.seed(1)
        loader = samestep.loader(stream, 4, seed=seed)
        found = [joined(loader), joined(loader)]
        return found, torch.rand(1).tolist(), random.random(), np.random.rand()

    (first, second), *own = passes(Shuffled(), 3)
    assert passes(Shuffled(), 3) == ([first, second], *own)
    assert first != second
    assert passes(Shuffled(), 4)[0] != [first, second]
    assert passes(Rows(), 3)[1:] == tuple(own)


def test_a_ragged_end_counts_by_its_samples_and_is_lent_to_a_rank_without(world):
    model = samestep.replicate(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    plain = nn.Linear(1, 1)
    plain.load_state_dict(model.state_dict())
    loader, seen, shares = samestep.loader(Rows(9), 4), 0, []
    for batch in loader:
        model(batch["row"][:, None]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        shares.append(samestep.sum(loader.share))
        seen += samestep.sum(len(batch["name"]))
    assert shares == pytest.approx([1.0] * 3)
    assert seen == 9
    optimizer = torch.optim.SGD(plain.parameters(), 1e-3)
    for batch in DataLoader(Rows(9), 4):
        plain(batch["row"][:, None]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for mine, serial in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, serial)
    with torch.no_grad():
        assert samestep.sum(sum(len(batch["name"]) for batch in loader)) == 9


def test_with_same_a_collate_fn_makes_the_batch_of_all_its_samples(world):
    def padded(samples):
        batch = default_collate(samples)
        longest = max(len(sample["name"]) for sample in samples)
        return {**batch, "name": [sample["name"].ljust(longest, ".") for sample in samples]}

    model = samestep.replicate(nn.Linear(1, 1), same=True)
    assert model.training
    for workers in (0, 1):
        options = {"collate_fn": padded, "num_workers": workers}
        assert joined(samestep.loader(Rows(), 6, **options)) == serially(DataLoader(Rows(), 6, **options))


def test_the_length_of_a_streams_loader_is_what_torch_says(world):
    with pytest.raises(TypeError, match=r"'Rows' has no len\(\)"):
        len(samestep.loader(Rows(), 4))
    for drop_last in (False, True):
        options = {"batch_size": 4, "drop_last": drop_last}
        loader = samestep.loader(Counted(), **options)
        assert len(loader) == len(DataLoader(Counted(), **options)) == len(list(loader))
    assert list(samestep.loader(Rows(0), 4)) == []
    assert list(samestep.loader(Rows(3), 4, drop_last=True)) == []


@pytest.mark.parametrize("turns", [2, 1000])
@pytest.mark.parametrize(
    ("workers", "seed"), [(0, None), pytest.param(2, None, marks=pytest.mark.slow), (0, 7)]
)
def test_a_state_goes_on_at_any_batch(world, workers, seed, turns, monkeypatch):
    monkeypatch.setattr(stream, "_MOST_TURNS", turns)

    def made():
        return samestep.loader(Shuffled(), 4, num_workers=workers, seed=seed)

    def trained(loader, first=0):
        """Batches and states; after every second batch the script draws from the streams of the dataset."""
        for _ in loader.epochs(2):
            for at, batch in enumerate(loader, first):
                yield joined([batch]), loader.state_dict(), streams.capture()
                if at % 2:
                    random.seed(random.random() + torch.rand(3).sum().item())
            first = 0

    torch.manual_seed(2)
    taken = list(trained(made()))
    for at, (_, state, kept) in enumerate(taken, 1):
        if at % 6 == 3:
            torch.manual_seed(99)
            other = made()
            other.load_state_dict(state)
            assert other.state_dict() == state
            streams.restore(kept)
            assert [batch for batch, *_ in trained(other, 3)] == [batch for batch, *_ in taken[at:]]


def test_a_stream_that_gives_other_samples_than_before_is_an_error(world):
    class Once(Rows):
        """Goes on from its last pass, as what reads from a socket does."""

        def __init__(self):
            self.left = iter(range(40))

        def __iter__(self):
            return ({"row": torch.tensor(float(number)), "name": ""} for number in self.left)

    stream = Once()
    loader = samestep.loader(stream, 4)
    for _ in loader:
        break
    state = loader.state_dict()
    for left in (stream, Rows(3)):
        other = samestep.loader(left, 4)
        other.load_state_dict(state)
        with pytest.raises(UsageError, match="epoch 1 other samples than before the run was resumed"):
            list(other)


def test_ranks_that_read_other_samples_are_an_error_when_training_begins(world):
    class ByRank(Rows):
        def __iter__(self):
            return ({"row": torch.tensor(float(world.rank)), "name": ""} for _ in range(8))

    model = samestep.replicate(nn.Linear(1, 1))
    assert model.training
    if world.size > 1:
        with pytest.raises(RanksDiffer, match=r"ByRank gives rank \d other samples than rank \d"):
            list(samestep.loader(ByRank(), 4))


def test_what_cannot_be_shared_is_a_sentence(world):
    for options, message in (
        ({"shuffle": True}, r"a stream, Rows, and shuffle; a stream gives the order itself"),
        ({"sampler": range(3)}, r"a stream, Rows, and sampler"),
        ({"persistent_workers": True, "num_workers": 1}, "leave persistent_workers out"),
        ({"num_workers": "auto"}, "depends on how many workers read it; write a number"),
    ):
        with pytest.raises(UsageError, match=message):
            samestep.loader(Rows(), 4, **options)
    with pytest.raises(UsageError, match="steps needs to know the batches of a pass before it begins"):
        samestep.steps(Rows(), 4, microbatch=1)
    if world.size > 1:
        with pytest.raises(RanksDiffer, match="num_workers"):
            samestep.loader(Rows(), 4, num_workers=world.rank)
    loader = samestep.loader(Rows(), 4)
    with pytest.raises(UsageError, match="this loader's num_workers is 1 and the state's is 0"):
        samestep.loader(Rows(), 4, num_workers=1).load_state_dict(loader.state_dict())


@pytest.mark.slow
def test_a_broken_stream_is_the_exception_of_its_own(world):
    class Broken(Rows):
        def __iter__(self):
            yield from super().__iter__()
            raise ZeroDivisionError("the stream ended badly")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # torch waits 5 s for the worker, which the exception keeps
        for workers in (0, 1) if world.size == 2 else (0,):
            with pytest.raises(ZeroDivisionError, match="the stream ended badly"):
                list(samestep.loader(Broken(), 4, num_workers=workers))


KILLED = """
    import signal
    torch.manual_seed(1)
    class Rows(torch.utils.data.IterableDataset):
        def __iter__(self):
            worker = torch.utils.data.get_worker_info()
            mine = range(worker.id, 22, 2) if worker else range(22)
            return (torch.full((4,), float(i)) + torch.rand(4) for i in mine)
    train = samestep.loader(Rows(), 4, num_workers=int(sys.argv[2]))
    checkpoint = samestep.Checkpoint(sys.argv[1], every=1, model=model, optimizer=optimizer, train=train)
    done = checkpoint.resume()
    for epoch in train.epochs(2):
        for x in train:
            print("batch", samestep.gather(x).tolist(), flush=True)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpoint.step()
            if checkpoint.steps == int(sys.argv[3]):
                checkpoint.commit(wait=True)
                os.kill(os.getpid(), signal.SIGKILL)
    print("ledger", train.ledger.hex())
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_that_was_killed_goes_on_at_another_size_with_the_same_batches(run, tmp_path, workers):
    def lines(source, size, *argv):
        said = run(source, size, *argv)[1][0]
        return [line for line in said.splitlines() if line.startswith(("batch", "ledger"))]

    whole = lines(KILLED, 1, tmp_path / "a", workers, 0)
    assert len(whole) == 13
    found = []
    for size, until in ((2, 4), (3, 9), (1, 0)):
        found += lines(KILLED, size, tmp_path / "b", workers, until)
    assert found == whole
