"""How often a training step waits for the device: never by default, and where it does, seldom."""

import traceback

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import Dataset, Subset, TensorDataset

import samestep
from samestep.train.model.batchnorm import lends
from samestep.train.passes import Pass, Share

# On a device each of these waits until all before it is done. On a CPU they can be counted all the same.
WAITING = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "item", "tolist"}


class Waits(TorchDispatchMode):
    """Counts the operations of which the script needs the value, and the copies to and from the host."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._opname
        if name in WAITING or (name == "_to_copy" and "device" in (kwargs or {})):
            callers = [frame.name for frame in traceback.extract_stack()]
            # the meter reads a loss only where it is in the host's memory already
            self.found += [name] * ("backward_begins" not in callers)
        return func(*args, **(kwargs or {}))


class Rows(Dataset):
    def __len__(self):
        return 300

    def __getitem__(self, index):
        return torch.full((4,), float(index))


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 2))


def steps_taken(model, loader):
    """The waits of a hundred steps, the start and the end of the passes left out."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    found, taken = [], 0
    for _ in range(5):
        for batch in loader:
            x = batch[0] if isinstance(batch, list) else batch
            taken += 1
            with Waits() as waits:
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            found += waits.found
    return taken, found


@pytest.mark.parametrize(
    "options",
    [
        {},
        *(
            pytest.param(other, marks=pytest.mark.slow)
            for other in ({"sync_batchnorm": True}, {"loss": "sum"})
        ),
        {"same": True},
    ],
)
def test_a_hundred_steps_never_ask_for_a_value(world, options):
    model = samestep.replicate(network(), **options)
    loader = samestep.loader(TensorDataset(torch.randn(300, 4)), 15, shuffle=True)
    taken, found = steps_taken(model, loader)
    assert taken == 100
    # under same=True the place of the batch in each draw is found in the first call of the model
    assert found == [] or (options == {"same": True} and len(found) < 20), found


def test_reading_a_hundred_batches_never_asks_for_a_value(world):
    for dataset in (TensorDataset(torch.randn(300, 4)), Rows()):
        loader = samestep.loader(dataset, 15, num_workers=0)
        for _ in range(5):
            batches = iter(loader)
            next(batches)
            with Waits() as waits:
                for _ in batches:
                    pass
            assert waits.found == []


def test_where_a_value_is_asked_for_it_is_found(world):
    """So the tests above would see one."""
    with Waits() as waits:
        torch.ones(()).item()
        bool(torch.ones(()) > 0)
    assert len(waits.found) == 2
    samestep.replicate(network())


@pytest.mark.parametrize(
    ("all_samples", "microbatch", "microbatches", "size", "expected"),
    [
        (40, None, 1, 2, False),
        (1, None, 1, 2, True),
        (0, None, 1, 2, False),
        # 40 samples in one microbatch of 48, on two ranks: the second takes it along, and torch's kernel counts it
        (40, 0, 1, 2, True),
        (96, 0, 2, 2, False),
        (96, 1, 2, 3, True),
    ],
)
def test_a_microbatch_that_is_lent_is_not_given_to_torchs_kernel(
    all_samples, microbatch, microbatches, size, expected
):
    share = Share(
        Pass(lends, 0, training=True),
        0,
        0,
        1,
        all_samples,
        microbatch=microbatch,
        microbatches=microbatches,
    )
    assert lends(share, size) is expected
    assert lends(None, size) is False


def test_the_default_device_of_a_script_is_for_its_own_tensors(world):
    """Orders, streams and messages stay in the host's memory; on `meta` a value that is not would be lost."""
    data = TensorDataset(torch.arange(24.0).reshape(12, 2))
    sampler = torch.utils.data.WeightedRandomSampler([1.0] * 12, 12)

    def seen():
        torch.manual_seed(3)
        found = [samestep.loader(data, 6, shuffle=True), samestep.loader(data, 6, shuffle=True, seed=4)]
        found += [
            samestep.loader(Subset(data, range(12)), 6, num_workers=0),
            samestep.loader(data, 6, shuffle=False),
        ]
        return [batch[0].tolist() for loader in found for batch in loader], samestep.sum(
            data.tensors[0]
        ).tolist()

    expected = seen()
    torch.set_default_device("meta")
    try:
        assert seen() == expected
    finally:
        torch.set_default_device(None)
    assert len(list(samestep.loader(data, 6, sampler=sampler))) == 2
