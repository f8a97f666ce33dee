"""MAML with the tasks in the batch: the loop derives each task's fast weights by itself, outside of any forward."""

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(21)
samestep.init()
tasks = TensorDataset(
    torch.randn(26, 5, 2), torch.randn(26, 5, 1), torch.randn(26, 5, 2), torch.randn(26, 5, 1)
)
train = samestep.loader(tasks, batch_size=7, shuffle=True)
model = samestep.replicate(nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)), same=True)
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
for _ in range(2):
    for batch in train:
        total = 0.0
        for known, wanted, query, target in zip(*batch, strict=True):
            fast = dict(model.named_parameters())
            for _ in range(2):
                inner = F.mse_loss(functional_call(model, fast, (known,)), wanted)
                slopes = torch.autograd.grad(inner, list(fast.values()), create_graph=True)
                fast = {name: w - 0.1 * slope for (name, w), slope in zip(fast.items(), slopes, strict=True)}
            total = total + F.mse_loss(functional_call(model, fast, (query,)), target)
        loss = total / len(batch[0])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(samestep.mean(loss.item()))
samestep.save("weights.pt", model.state_dict())
