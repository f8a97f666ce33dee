"""MAML: two inner steps on functional copies of the weights, with dropout, and a query set in each batch."""

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(18)
samestep.init()
data = TensorDataset(torch.randn(37, 4), torch.randn(37, 1), torch.randn(37, 4), torch.randn(37, 1))
train = samestep.loader(data, batch_size=8, shuffle=True)
model = samestep.replicate(
    nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1)), same=True
)
opt = torch.optim.Adam(model.parameters(), 1e-2)
for _ in range(3):
    for xs, ys, xq, yq in train:
        fast = dict(model.named_parameters())
        for _ in range(2):
            inner = F.mse_loss(functional_call(model, fast, (xs,)), ys)
            grads = torch.autograd.grad(inner, list(fast.values()), create_graph=True)
            fast = {k: w - 0.1 * g for (k, w), g in zip(fast.items(), grads)}
        loss = F.mse_loss(functional_call(model, fast, (xq,)), yq)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(samestep.mean(loss.item()))
samestep.save("weights.pt", model.state_dict())
