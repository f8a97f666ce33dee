"""Channels last, with dropout of elements, of channels and alpha dropout; shares of one sample included."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(19)
world = samestep.init()
data = TensorDataset(torch.randn(31, 3, 6, 6), torch.randint(0, 3, (31,)))
train = samestep.loader(data, batch_size=7, shuffle=True)
model = nn.Sequential(
    nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2), nn.Conv2d(4, 6, 3, padding=1), nn.SELU(),
    nn.Dropout2d(0.3), nn.AlphaDropout(0.1), nn.FeatureAlphaDropout(0.1), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
    nn.Linear(24, 3),
)  # fmt: skip
model = samestep.replicate(model.to(world.device, memory_format=torch.channels_last), same=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, nesterov=True, momentum=0.9)
for epoch in range(3):
    for x, y in train:
        x = x.contiguous(memory_format=torch.channels_last)
        x = x + 0.1 * torch.randn_like(x)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        print(epoch, samestep.mean(loss.item()))
samestep.save("weights.pt", {name: weight.contiguous() for name, weight in model.state_dict().items()})
