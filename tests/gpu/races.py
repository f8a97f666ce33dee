"""Batches of tensors and of objects with their own `.to`, used late by a delayed stream, have the right values."""

import os

import torch
from torch.utils.data import Dataset, Subset, TensorDataset

import samestep

ROWS = torch.arange(48_000.0).reshape(240, 200)


class Graph:
    def __init__(self, x):
        self._x = [x]

    def to(self, device):
        return Graph(self._x[0].to(device, non_blocking=True))

    def pin_memory(self):
        return Graph(self._x[0].pin_memory())

    @property
    def x(self):
        return self._x[0]


class Graphs(Dataset):
    def __len__(self):
        return len(ROWS)

    def __getitem__(self, index):
        return ROWS[index]


def together(samples):
    return Graph(torch.stack(samples))


world = samestep.init(backend=os.environ.get("SAMESTEP_TEST_BACKEND"))
on_gpu = world.device.type == "cuda"
# torch's sanitizer asks CUDA in every process, and a forked one cannot use it
workers = 0 if "TORCH_CUDA_SANITIZER" in os.environ else 1
data = TensorDataset(ROWS)
loaders = {
    "tensors in memory": samestep.loader(data, 8),
    "tensors from workers": samestep.loader(Subset(data, range(len(ROWS))), 8, num_workers=workers),
    "objects": samestep.loader(Graphs(), 8, num_workers=workers, collate_fn=together),
    "tensors on the device": samestep.loader(TensorDataset(ROWS.to(world.device)), 8),
}
for name, loader in loaders.items():
    for _ in range(3):
        results = []
        for batch in loader:
            if on_gpu:
                torch.cuda._sleep(3_000_000)
            x = batch.x if isinstance(batch, Graph) else batch[0]
            results.append((x * 2 + 1).sum(1))
            del x, batch
        found = torch.cat([result.cpu() for result in results])
        assert torch.equal(found, torch.cat([(rows * 2 + 1).sum(1) for rows in ROWS.split(8)])), name
print("every batch has the values of its samples")
