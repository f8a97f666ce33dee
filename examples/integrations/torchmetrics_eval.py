"""Evaluates with torchmetrics, which adds its states over the ranks in compute()."""

import torch
from torch.utils.data import TensorDataset
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

import samestep

world = samestep.init()
torch.manual_seed(0)
dataset = TensorDataset(torch.randn(101, 8), torch.randint(0, 3, (101,)))
test = samestep.loader(dataset, batch_size=20)
model = samestep.replicate(torch.nn.Linear(8, 3).to(world.device)).eval()
accuracy = MulticlassAccuracy(3, average="micro").to(world.device)
f1 = MulticlassF1Score(3).to(world.device)

with torch.no_grad():
    for x, y in test:
        accuracy.update(model(x), y)
        f1.update(model(x), y)

print(f"accuracy {accuracy.compute():.6f}, F1 {f1.compute():.6f}")
