"""Stops after two batches and goes on from the state: torchdata's StatefulDataLoader, and samestep's loader."""

import torch
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import samestep

world = samestep.init()
dataset = TensorDataset(torch.arange(20))


def batches(make):
    """The sums of all batches, the first two from one loader and the others from another one."""
    first, second = make(), make()
    passing = iter(first)
    taken = [next(passing), next(passing)]
    second.load_state_dict(first.state_dict())
    return [x.sum().item() for (x,) in [*taken, *second]]


# Every rank of the first reads all samples of each batch; every rank of the second reads its share.
print("torchdata", batches(lambda: StatefulDataLoader(dataset, 4)))
print("samestep ", [samestep.sum(mine) for mine in batches(lambda: samestep.loader(dataset, 4))])
