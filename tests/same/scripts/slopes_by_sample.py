"""torch.func derives the slope of each sample, and the loop clips each one."""

import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(13)
world = samestep.init()
samples = torch.randn(33, 4)
train = samestep.loader(TensorDataset(samples, samples.sum(1)), batch_size=8, shuffle=True)
model = samestep.replicate(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)), same=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def loss_of(weights, x, y):
    return F.mse_loss(functional_call(model, weights, (x[None],)).squeeze(), y)


for _ in range(2):
    for x, y in train:
        weights = {name: weight.detach() for name, weight in model.named_parameters()}
        slopes = vmap(grad(loss_of), in_dims=(None, 0, 0))(weights, x, y)
        for name, weight in model.named_parameters():
            norms = slopes[name].flatten(1).norm(dim=1).clamp(min=0.5)
            clipped = slopes[name] / norms.view(-1, *[1] * weight.dim())
            weight.grad = samestep.mean(clipped.mean(0)) + 0.1 * torch.randn_like(weight)
        optimizer.step()
        print(sum(float(weight.abs().sum()) for weight in model.parameters()))
samestep.save("weights.pt", model.state_dict())
