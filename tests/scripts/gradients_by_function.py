"""Each rank takes the gradient of its own share by torch.func.

verdict: different
cause: each rank makes (autograd.grad, torch.func)
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad
from torch.utils.data import TensorDataset

import samestep


def loss_of(weights, x, y):
    return F.cross_entropy(functional_call(model, weights, (x,)), y)


torch.manual_seed(0)
samestep.init()
data = TensorDataset(torch.randn(40, 6), torch.randint(0, 3, (40,)))
model = samestep.replicate(nn.Linear(6, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in samestep.loader(data, 8, shuffle=True):
    found = grad(loss_of)({name: weight.detach() for name, weight in model.named_parameters()}, x, y)
    for name, weight in model.named_parameters():
        weight.grad = found[name]
    optimizer.step()
