"""Each rank gets its share of the serial batches: whole, once, and the same at any number of processes."""

import random
from collections import namedtuple
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

import samestep
from samestep import RanksDiffer, UsageError
from samestep.train.data import share
from samestep.train.nested import map_tensors

Point = namedtuple("Point", "x y")


@dataclass(frozen=True)
class Box:
    x: torch.Tensor
    name: str = "box"
    size: int = field(init=False, default=0)


class Numbers(Dataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.tensor(index), float(index), str(index)


class Noisy(Numbers):
    """A sample of its own random numbers, and no NumPy before the first one."""

    def __getitem__(self, index):
        import numpy.random

        return torch.tensor(
            [index, torch.rand(()), random.random(), numpy.random.rand()], dtype=torch.float64
        )


def together(batches):
    """All ranks' shares of each batch, in the order of ranks."""
    return [sorted(samestep.gather(list(batch))) for batch in batches]


def serial(length, batch_size, order=None):
    order = list(range(length)) if order is None else order
    return [sorted(order[at : at + batch_size]) for at in range(0, length, batch_size)]


@pytest.mark.parametrize("length", [0, 1, 2, 3, 10, 12, 13])
def test_evaluation_sees_every_sample_once_also_with_fewer_samples_than_ranks(world, length):
    # without gradients, as an evaluation: beside a model in training a rank without a share is lent the batch
    with torch.no_grad():
        for dataset in (TensorDataset(torch.arange(length)), Numbers(length)):
            seen = [int(sample) for x, *_ in samestep.loader(dataset, 4, num_workers=0) for sample in x]
            assert sorted(samestep.gather(seen)) == list(range(length))
            count = samestep.sum(sum(len(x) for x, *_ in samestep.loader(dataset, 4, num_workers=0)))
            assert count == length


def test_a_shuffled_epoch_has_the_same_batches_at_any_size_and_new_ones_each_epoch(world):
    loader = samestep.loader(TensorDataset(torch.arange(24)), 8, shuffle=True, seed=3)
    epochs = [together(x.tolist() for (x,) in loader) for _ in range(3)]
    for epoch, batches in enumerate(epochs):
        order = share.order(24, 3, epoch, True).tolist()
        assert batches == serial(24, 8, order)
    assert epochs[0] != epochs[1] != epochs[2]
    assert loader.epoch == 2


def test_a_loader_says_its_length_dataset_batch_size_and_share(world):
    data = Numbers(10)
    loader = samestep.loader(data, 4)
    assert (len(loader), len(samestep.loader(data, 4, drop_last=True)), len(samestep.loader(data, 5))) == (
        3,
        2,
        2,
    )
    assert loader.dataset is data
    assert len(loader.sampler) == 10
    assert (loader.batch_size, loader.share) == (4, 1 / world.size)
    assert len(list(samestep.loader(data, 4, drop_last=True, num_workers=0))) == 2
    of_torch = DataLoader(data, 4, collate_fn=list)
    loader = samestep.loader(data, 4, collate_fn=list)
    for name in vars(of_torch).keys() - {"sampler", "batch_sampler"}:
        assert name.startswith("_") or getattr(loader, name) == getattr(of_torch, name), name
    assert len(loader.batch_sampler) == 3
    with pytest.raises(AttributeError, match="has no attribute 'workers'; it has"):
        loader.workers  # noqa: B018


def test_tensors_in_memory_come_bit_for_bit_as_from_a_dataloader(world):
    torch.manual_seed(0)
    for tensor in (
        torch.rand(13, 3, 2),
        torch.arange(13),
        torch.rand(13) > 0.5,
        torch.rand(13, 2).bfloat16(),
    ):
        data = TensorDataset(tensor, torch.arange(13))
        fast = list(samestep.loader(data, 4, shuffle=True, seed=0))
        slow = list(samestep.loader(Subset(data, range(13)), 4, shuffle=True, seed=0, num_workers=0))
        assert len(fast) == len(slow)
        for batch, other in zip(fast, slow, strict=True):
            assert type(batch) is type(other) is list
            assert all(torch.equal(*pair) for pair in zip(batch, other, strict=True))
            assert [x.dtype for x in batch] == [x.dtype for x in other]


def test_changing_a_batch_in_place_leaves_the_dataset_alone(world):
    data = torch.arange(9.0)
    for (x,) in samestep.loader(TensorDataset(data), 3):
        x.zero_()
    assert torch.equal(data, torch.arange(9.0))


def test_a_serial_dataloader_gives_the_same_batches(world):
    data = Numbers(11)
    ours = samestep.loader(data, 4, num_workers=0)
    assert together(x.tolist() for x, *_ in ours) == [x.tolist() for x, *_ in DataLoader(data, 4)]


def test_random_augmentation_belongs_to_the_sample_not_to_worker_or_rank(world):
    expected = None
    for workers in (0, 2):
        loader = samestep.loader(Noisy(7), 3, shuffle=True, seed=1, num_workers=workers)
        epochs = []
        for _ in range(2):
            with torch.no_grad():
                rows = samestep.gather([row for x in loader for row in x.tolist()])
            epochs.append(sorted(map(tuple, rows)))
        assert epochs[0] != epochs[1]
        assert [row[0] for row in epochs[0]] == list(range(7))
        assert len({row[1] for row in epochs[0]}) == 7
        expected = expected or epochs
        assert epochs == expected
    assert [round(value, 6) for value in expected[0][0][1:]] == NOISE


NOISE = [0.359653, 0.912645, 0.927186]


def test_loading_does_not_disturb_the_scripts_random_streams(world):
    for workers in (0, 1):
        loader = samestep.loader(Noisy(6), 3, shuffle=True, seed=0, num_workers=workers)
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)
        expected = torch.rand(1), random.random(), np.random.rand()
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)
        list(loader)
        assert (torch.rand(1), random.random(), np.random.rand()) == expected


def test_a_sampler_gives_the_same_order_on_all_ranks_at_any_size(world):
    weights = torch.arange(1.0, 21.0)
    orders = []
    for generator in (None, torch.Generator()):
        torch.manual_seed(world.rank)
        sampler = WeightedRandomSampler(weights, 20, replacement=True, generator=generator)
        loader = samestep.loader(TensorDataset(torch.arange(20)), 6, sampler=sampler, seed=0)
        orders.append([together(x.tolist() for (x,) in loader) for _ in range(2)])
        assert len(loader) == 4
    for first, second in orders:
        assert first != second
    assert [order[0][0] for order in orders] == [[14, 16, 16, 16, 19, 19], [0, 4, 10, 12, 14, 15]]


class Shuffled:
    """A sampler that draws from Python's stream, or NumPy's."""

    def __init__(self, shuffle):
        self.shuffle = shuffle

    def __len__(self):
        return 12

    def __iter__(self):
        order = list(range(12))
        self.shuffle(order)
        return iter(order)


def test_a_sampler_may_draw_from_any_stream(world):
    for shuffle, seed in ((random.shuffle, random.seed), (np.random.shuffle, np.random.seed)):
        seed(world.rank)
        loader = samestep.loader(TensorDataset(torch.arange(12)), 6, sampler=Shuffled(shuffle))
        seen = samestep.gather([x for (batch,) in loader for x in batch.tolist()])
        assert sorted(seen) == list(range(12))


def test_epochs_go_on_in_the_one_that_was_left(world):
    data = TensorDataset(torch.arange(10))
    loader = samestep.loader(data, 4, shuffle=True, seed=0)
    whole = [[x.tolist() for (x,) in loader] for _ in loader.epochs(3)]
    assert len(whole) == 3
    assert list(loader.epochs(3)) == []
    for stop in range(1, 4):
        first = samestep.loader(data, 4, shuffle=True, seed=0)
        for epoch in first.epochs(3):
            for step, _ in enumerate(first, 1):
                if (epoch, step) == (1, stop):
                    state = first.state_dict()
            if epoch == 1:
                break
        second = samestep.loader(data, 4, shuffle=True, seed=0)
        second.load_state_dict(state)
        rest = {epoch: [x.tolist() for (x,) in second] for epoch in second.epochs(3)}
        assert rest == {1: whole[1][stop:], 2: whole[2]}


def test_a_second_pass_within_an_epoch_takes_nothing_from_the_next(world):
    loader = samestep.loader(TensorDataset(torch.arange(10)), 4, shuffle=True, seed=0)
    alone = [[x.tolist() for (x,) in loader] for _ in loader.epochs(3)]
    loader = samestep.loader(TensorDataset(torch.arange(10)), 4, shuffle=True, seed=0)
    passes = [[[x.tolist() for (x,) in loader] for _ in range(2)] for _ in loader.epochs(3)]
    assert [first for first, _ in passes] == alone


def test_a_state_goes_on_at_any_position_and_at_another_size(world, tmp_path):
    """The state says samples, not ranks: what rank and size it was taken on leaves no trace in it."""
    data = TensorDataset(torch.arange(11))
    loader = samestep.loader(data, 4, shuffle=True, seed=2)
    torch.set_grad_enabled(True)
    order = share.order(11, 2, 1, True).tolist()
    for position, left in ((0, 3), (4, 2), (8, 1), (11, 0)):
        state = {
            "epoch": 1,
            "position": position,
            "length": 11,
            "batch_size": 4,
            "seed": 2,
            "shuffle": True,
            "drop_last": False,
        }
        loader.load_state_dict(state)
        assert loader.state_dict() == state
        seen = samestep.gather([int(sample) for (x,) in loader for sample in x])
        assert sorted(seen) == sorted(order[position:])
        assert left == len(serial(11 - position, 4))
        assert loader.state_dict()["position"] == 11


def test_a_break_leaves_the_position_behind_the_last_batch_handed_out(world):
    loader = samestep.loader(TensorDataset(torch.arange(12)), 4)
    for step, _ in enumerate(loader):
        if step == 1:
            break
    assert loader.state_dict()["position"] == 8
    assert sorted(samestep.gather([int(sample) for (x,) in loader for sample in x])) == list(range(12))
    assert loader.epoch == 1


def test_a_state_of_another_loader_is_refused(world):
    state = samestep.loader(Numbers(10), 4).state_dict()
    with pytest.raises(UsageError, match=r"this loader's batch_size is 5 and the state's is 4; use the same"):
        samestep.loader(Numbers(10), 5).load_state_dict(state)
    with pytest.raises(UsageError, match="length is 11 and the state's is 10"):
        samestep.loader(Numbers(11), 4).load_state_dict(state)


def test_an_evaluation_inside_a_training_loop_keeps_the_outer_share(world):
    train = samestep.loader(TensorDataset(torch.arange(10.0)), 5)
    test = samestep.loader(TensorDataset(torch.arange(7.0)), 5)
    for (x,) in train:
        whole = samestep.mean(x.mean())
        with torch.no_grad():
            means = [samestep.sum(y.sum()) for (y,) in test]
        assert sum(means) == 21.0
        assert samestep.mean(x.mean()) == whole
    assert whole == 7.0


def test_nested_values_keep_their_types():
    double = map_tensors(
        lambda tensor: tensor * 2, {"a": [torch.ones(1), "text", None], "b": (1, torch.ones(2))}
    )
    assert double["a"][0].item() == 2
    assert double["a"][1:] == ["text", None]
    assert type(double["b"]) is tuple
    point = map_tensors(lambda tensor: tensor + 1, Point(torch.zeros(1), [torch.zeros(1)]))
    assert type(point) is Point
    assert point.y[0].item() == 1
    box = map_tensors(lambda tensor: tensor + 1, Box(torch.zeros(1)))
    assert (type(box), box.x.item(), box.name) == (Box, 1, "box")
    from collections import OrderedDict, defaultdict

    assert type(map_tensors(lambda tensor: tensor, OrderedDict(a=torch.ones(1)))) is OrderedDict
    lists = defaultdict(list, a=[torch.ones(1)])
    moved = map_tensors(lambda tensor: tensor + 1, lists)
    assert moved["a"][0].item() == 2
    assert moved["new"] == []
    assert lists["a"][0].item() == 1


def test_structures_and_text_arrive_as_the_collate_function_made_them(world):
    def collate(samples):
        return {
            "box": Box(torch.stack([x for x, _, _ in samples])),
            "names": [name for _, _, name in samples],
            "no": None,
        }

    for batch in samestep.loader(Numbers(6), 3, collate_fn=collate, num_workers=0):
        assert [str(x) for x in batch["box"].x.tolist()] == batch["names"]
        assert batch["no"] is None


def test_what_a_loader_cannot_take_is_refused_with_what_to_write(world):
    with pytest.raises(
        UsageError, match=r"loader knows no option colour; it takes those of torch's DataLoader"
    ):
        samestep.loader(Numbers(4), 4, colour=1)
    with pytest.raises(UsageError, match=r"generator is an int; pass a torch.Generator"):
        samestep.loader(Numbers(4), 4, generator=7)
    with pytest.raises(UsageError, match=r"both a generator and a seed; the generator gives the order"):
        samestep.loader(Numbers(4), 4, seed=0, generator=torch.Generator())
    with pytest.raises(UsageError, match=r"num_workers is 'all'; write a number, or \"auto\""):
        samestep.loader(Numbers(4), 4, num_workers="all")
    with pytest.raises(UsageError, match=r"both a sampler and shuffle=True"):
        samestep.loader(Numbers(4), 4, sampler=range(4), shuffle=True, seed=0)

    for stream in (iter([1]), (sample for sample in [1])):
        with pytest.raises(
            UsageError, match=r"loader got \w+, which has no samples by index; give it __len__"
        ):
            samestep.loader(stream, 4)

    class Endless(Dataset):
        def __getitem__(self, index):
            return index

    with pytest.raises(UsageError, match=r"loader got Endless, which has no length; give it a __len__"):
        samestep.loader(Endless(), 4)
    if world.size > 1:
        with pytest.raises(UsageError, match=rf"batch_size 1 is smaller than the {world.size} ranks"):
            samestep.loader(Numbers(4), 1)
    with pytest.raises(UsageError, match="batch_size 0 is not a number of samples"):
        samestep.loader(Numbers(4), 0)


@pytest.mark.sizes(2, 3)
def test_ranks_with_other_datasets_or_options_are_named_on_all_of_them(world):
    with pytest.raises(
        RanksDiffer, match=r"samestep.loader got length \d+ on rank \d and \d+ on rank \d; give every"
    ):
        samestep.loader(Numbers(10 + (world.rank == 1)), 4)
    with pytest.raises(RanksDiffer, match=r"samestep.loader got seed \d on rank \d and \d on rank \d"):
        samestep.loader(Numbers(10), 4, seed=world.rank)


def test_an_exception_in_the_dataset_comes_out(world):
    class Broken(Numbers):
        def __getitem__(self, index):
            raise ZeroDivisionError("sample")

    with pytest.raises(ZeroDivisionError):
        list(samestep.loader(Broken(4), 4, num_workers=0))


def test_cycle_repeats_the_batches_of_one_pass_with_their_shares(world):
    """A batch of 5 samples and one of 2, of which a third rank has none: their gradients are the serial script's."""
    torch.manual_seed(0)
    data = TensorDataset(torch.arange(7.0)[:, None], torch.arange(7.0)[:, None] ** 2)
    model = samestep.replicate(torch.nn.Linear(1, 1))
    plain = torch.nn.Linear(1, 1)
    plain.load_state_dict(model.state_dict())
    batches = samestep.loader(data, 5, shuffle=True, seed=1).cycle()
    seen = []
    for step in range(6):
        x, y = next(batches)
        loss = (model(x * 2) - y).square().mean()  # an input that was computed belongs to the batch at hand
        model.zero_grad()
        loss.backward()
        whole = samestep.gather(x), samestep.gather(y)
        plain.zero_grad()
        (plain(whole[0] * 2) - whole[1]).square().mean().backward()
        assert torch.allclose(model.weight.grad, plain.weight.grad)
        seen.append(whole[0].flatten().tolist())
        assert len(seen[-1]) == (5, 2)[step % 2]
    assert seen[2:] == seen[:2] * 2
