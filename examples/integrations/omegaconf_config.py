"""Reads its settings with OmegaConf: `samestep run -n 2 omegaconf_config.py lr=0.2 batch_size=64`."""

import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from torch.utils.data import TensorDataset

import samestep

config = OmegaConf.merge({"lr": 0.1, "batch_size": 32, "epochs": 2}, OmegaConf.from_cli())
world = samestep.init()
torch.manual_seed(0)
dataset = TensorDataset(torch.randn(200, 8), torch.randint(0, 3, (200,)))
train = samestep.loader(dataset, config.batch_size, shuffle=True)
model = samestep.replicate(torch.nn.Linear(8, 3).to(world.device))
optimizer = torch.optim.SGD(model.parameters(), config.lr)

for _ in range(config.epochs):
    for x, y in train:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

print(f"lr {config.lr}, batch {config.batch_size}, weight {model.weight.sum().item():.4f}")
