"""The weights are updated by hand, without an optimizer.

verdict: refused
cause: updates the weights by hand
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(0)
samestep.init()
loader = samestep.loader(TensorDataset(torch.randn(40, 6), torch.randn(40, 1)), 8, shuffle=True)
model = samestep.replicate(nn.Linear(6, 1))
for x, y in loader:
    F.mse_loss(model(x), y).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
            parameter.grad = None
