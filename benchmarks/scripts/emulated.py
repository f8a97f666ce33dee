"""Trains layers whose compute is a pause for each sample, so that two cores are enough for many ranks."""

import sys
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

import samestep

SHAPES = {"even": [325_000] * 8, "front": [2_000_000, *[100_000] * 6], "back": [*[100_000] * 6, 2_000_000]}
BATCH, WIDE = 24, 100


class Pause(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(2 * ctx.seconds)
        return gradient, None


class Net(nn.Module):
    def __init__(self, shape: str, seconds: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDE, size // WIDE, bias=False) for size in SHAPES[shape])
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = Pause.apply(x + layer(x[:1])[:, :WIDE], self.seconds * len(x))
        return x


if __name__ == "__main__":
    samestep.init()
    torch.manual_seed(0)
    train = samestep.loader(TensorDataset(torch.randn(BATCH * 500, WIDE)), BATCH, shuffle=True, seed=0)
    model = samestep.replicate(Net(sys.argv[1], float(sys.argv[2])))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-7)
    for (x,) in train:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
