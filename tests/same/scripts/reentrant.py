"""Checkpointed blocks, some reentrant, with dropout and BatchNorm, under bfloat16 autocast only outside of them."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from torch.utils.data import TensorDataset

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(15)
samestep.init()
train = samestep.loader(
    TensorDataset(torch.randn(39, 6), torch.randint(0, 3, (39,))), batch_size=9, shuffle=True
)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(6, 10)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(10, 10), nn.GELU(), nn.Dropout(0.2)) for _ in range(4))
        )
        self.last = nn.Sequential(nn.Linear(10, 10), nn.Dropout(0.3), nn.Tanh())
        self.out = nn.Linear(10, 3)

    def forward(self, x):
        x = self.inp(x)
        x = checkpoint_sequential(self.blocks, 2, x, use_reentrant=True)
        x = checkpoint(self.last, x, use_reentrant=False)
        return self.out(x)


model = samestep.replicate(Net(), same=True)
opt = torch.optim.NAdam(model.parameters(), 1e-2)
for _ in range(3):
    for x, y in train:
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(samestep.mean(loss.item()))
samestep.save("weights.pt", model.state_dict())
