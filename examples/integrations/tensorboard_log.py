"""Writes the loss of the whole batch to TensorBoard, from rank 0."""

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset
from torch.utils.tensorboard import SummaryWriter

import samestep

world = samestep.init()
torch.manual_seed(0)
dataset = TensorDataset(torch.randn(200, 8), torch.randint(0, 3, (200,)))
train = samestep.loader(dataset, batch_size=32, shuffle=True)
model = samestep.replicate(torch.nn.Linear(8, 3).to(world.device))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
writer = SummaryWriter("tensorboard") if world.rank == 0 else None

for step, (x, y) in enumerate(train):
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    mean = samestep.mean(loss.item())  # on every rank, before the `if`
    if writer:
        writer.add_scalar("loss", mean, step)

if writer:
    writer.close()
