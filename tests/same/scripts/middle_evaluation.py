"""An evaluation in the middle of each epoch that draws, once in eval() mode and once with dropout left on."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset, WeightedRandomSampler

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(22)
world = samestep.init()
data, held = (
    TensorDataset(torch.randn(37, 6), torch.randn(37, 1)),
    TensorDataset(torch.randn(13, 6), torch.randn(13, 1)),
)
train = samestep.loader(data, batch_size=8, sampler=WeightedRandomSampler(torch.rand(37), 37))
test = samestep.loader(held, batch_size=6)  # a last batch of one sample
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1)).to(world.device)
model = samestep.replicate(model, same=True)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)


@torch.no_grad()
def evaluate(noise, training):
    model.train(training)
    missed = sum(
        F.mse_loss(model(x + noise * torch.randn_like(x)), y, reduction="sum").item() for x, y in test
    )
    model.train()
    return samestep.sum(missed) / 13


for epoch in range(3):
    for step, (x, y) in enumerate(train):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        print("loss", samestep.mean(loss.item(), weight=len(x)))
        if step == 2:
            print(epoch, evaluate(0.1, training=False), evaluate(0.0, training=True))
samestep.save("weights.pt", model.state_dict())
