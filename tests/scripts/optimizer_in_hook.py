"""Each parameter has an optimizer that steps inside of backward, as in torch's tutorial; hooks see the whole gradient.

verdict: same
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(0)
samestep.init()
data = TensorDataset(torch.randn(43, 6), torch.randint(0, 3, (43,)))
train = samestep.loader(data, 8, shuffle=True)
model = samestep.replicate(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
optimizers = {parameter: torch.optim.Adam([parameter], foreach=False) for parameter in model.parameters()}


def step(parameter):
    optimizers[parameter].step()
    optimizers[parameter].zero_grad()


for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(step)
for epoch in range(2):
    total = 0.0
    for x, y in train:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        total += loss.item() * len(x)
    print(f"epoch {epoch}: loss {samestep.sum(total) / len(data):.4f}")
