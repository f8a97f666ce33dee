"""pytorch/examples time_sequence_prediction: LBFGS with a closure on full batches.

verdict: same
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(0)
samestep.init()
loader = samestep.loader(TensorDataset(torch.randn(24, 4), torch.randn(24, 1)), 24)
model = samestep.replicate(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)))
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
for step in range(3):
    for x, y in loader:

        def closure():
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        print("loss:", f"{float(loss):.4f}")
