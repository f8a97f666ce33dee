"""A DataLoader's generator, or that of a sampler: the batches, and what is left in each stream, are torch's."""

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

import samestep

DATA = TensorDataset(torch.arange(15))


def shuffled(own):
    return {"batch_size": 4, "shuffle": True, "generator": own}


def shuffled_to_the_last_full(own):
    return {"batch_size": 4, "shuffle": True, "drop_last": True, "generator": own}


def in_order(own):
    return {"batch_size": 4, "generator": own}


def sampled(own):
    return {"batch_size": 4, "sampler": RandomSampler(DATA, generator=own)}


def sampled_to_the_last_full(own):
    return {"batch_size": 4, "drop_last": True, "sampler": RandomSampler(DATA, generator=own)}


def with_replacement(own):
    return {"batch_size": 4, "sampler": RandomSampler(DATA, replacement=True, num_samples=11, generator=own)}


def by_two_generators(own):
    other = torch.Generator().manual_seed(5)
    return {"batch_size": 4, "sampler": RandomSampler(DATA, generator=other), "generator": own}


def in_batches(own):
    return {"batch_sampler": BatchSampler(RandomSampler(DATA, generator=own), 4, True), "generator": own}


KINDS = [shuffled, shuffled_to_the_last_full, in_order, sampled, sampled_to_the_last_full, with_replacement]
KINDS += [by_two_generators, in_batches]


def taken_over(dataset, **options):
    return samestep.loader(DataLoader(dataset, **options))


def passes(make, options, whole):
    torch.manual_seed(2)
    own = torch.Generator().manual_seed(3)
    loader, taken = make(DATA, **options(own)), []
    for _ in range(3):
        taken += [sorted(whole(rows).tolist()) for (rows,) in loader]
        taken += [torch.rand(1, generator=own).item(), torch.rand(1).item()]
    return taken


@pytest.mark.parametrize("make", [samestep.loader, taken_over])
@pytest.mark.parametrize("options", KINDS)
def test_batches_and_what_is_drawn_after_each_pass_are_torchs(world, options, make):
    assert passes(make, options, samestep.gather) == passes(DataLoader, options, lambda rows: rows)


@pytest.mark.parametrize("options", [shuffled, shuffled_to_the_last_full, by_two_generators])
@pytest.mark.parametrize("taken", [2, 3, 5])
def test_a_state_goes_on_in_the_order_of_the_generator(world, options, taken):
    def batches(state=None, stop=None):
        loader = samestep.loader(DATA, **options(torch.Generator().manual_seed(3)))
        if state:
            loader.load_state_dict(state)
        given = (samestep.gather(rows).tolist() for _ in loader.epochs(3) for (rows,) in loader)
        return [batch for _, batch in zip(range(stop or 99), given, strict=False)], loader.state_dict()

    whole, _ = batches()
    _, state = batches(stop=taken)
    rest, _ = batches(state)
    assert rest == whole[taken:]
