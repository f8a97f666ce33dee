"""MAML with the tasks in the batch: a model's call derives each task's fast weights by itself."""

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(12)
world = samestep.init()


class Meta(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, *tasks):
        losses = []
        for known, wanted, query, target in zip(*tasks, strict=True):
            fast = dict(self.net.named_parameters())
            for _ in range(2):
                inner = F.mse_loss(functional_call(self.net, fast, (known,)), wanted)
                slopes = torch.autograd.grad(inner, list(fast.values()), create_graph=True)
                fast = {name: w - 0.1 * slope for (name, w), slope in zip(fast.items(), slopes, strict=True)}
            losses.append(F.mse_loss(functional_call(self.net, fast, (query,)), target))
        return torch.stack(losses)


tasks = TensorDataset(
    torch.randn(26, 5, 2), torch.randn(26, 5, 1), torch.randn(26, 5, 2), torch.randn(26, 5, 1)
)
train = samestep.loader(tasks, batch_size=7, shuffle=True)
model = samestep.replicate(Meta(), same=True)
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
for _ in range(2):
    for batch in train:
        loss = model(*batch).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(samestep.mean(loss.item()))
samestep.save("weights.pt", model.state_dict())
