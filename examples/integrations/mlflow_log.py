"""Logs to MLflow from rank 0, into a local store that `mlflow ui` shows."""

import mlflow
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import samestep

world = samestep.init()
torch.manual_seed(0)
dataset = TensorDataset(torch.randn(200, 8), torch.randint(0, 3, (200,)))
train = samestep.loader(dataset, batch_size=32, shuffle=True)
model = samestep.replicate(torch.nn.Linear(8, 3).to(world.device))
optimizer = torch.optim.SGD(model.parameters(), 0.1)

if world.rank == 0:
    mlflow.set_tracking_uri("sqlite:///mlflow.db")
    mlflow.set_experiment("digits")
    mlflow.log_params({"lr": 0.1, "batch_size": train.batch_size})

for step, (x, y) in enumerate(train):
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    mean = samestep.mean(loss.item())  # on every rank, before the `if`
    if world.rank == 0:
        mlflow.log_metric("loss", mean, step)

if world.rank == 0:
    mlflow.end_run()
