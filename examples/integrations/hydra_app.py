"""Reads its settings with Hydra: `samestep run -n 2 hydra_app.py lr=0.2 batch_size=64`."""

from dataclasses import dataclass

import hydra
import torch
import torch.nn.functional as F
from hydra.core.config_store import ConfigStore
from torch.utils.data import TensorDataset

import samestep


@dataclass
class Settings:
    lr: float = 0.1
    batch_size: int = 32
    epochs: int = 2


ConfigStore.instance().store("settings", Settings)


@hydra.main(version_base=None, config_name="settings")
def main(config):
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


main()
