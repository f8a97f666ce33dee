"""Logs to Weights & Biases in offline mode, from rank 0; `wandb sync wandb/offline-run-*` sends it later."""

import torch
import torch.nn.functional as F
import wandb
from torch.utils.data import TensorDataset

import samestep

world = samestep.init()
torch.manual_seed(0)
dataset = TensorDataset(torch.randn(200, 8), torch.randint(0, 3, (200,)))
train = samestep.loader(dataset, batch_size=32, shuffle=True)
model = samestep.replicate(torch.nn.Linear(8, 3).to(world.device))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
run = wandb.init(project="digits", mode="offline" if world.rank == 0 else "disabled")

for x, y in train:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    run.log({"loss": samestep.mean(loss.item())})

run.finish()
