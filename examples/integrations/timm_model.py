"""Trains a model of timm with random weights; nothing is downloaded."""

import timm
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import samestep

world = samestep.init()
torch.manual_seed(0)
images = TensorDataset(torch.randn(24, 3, 32, 32), torch.randint(0, 3, (24,)))
train = samestep.loader(images, batch_size=8, shuffle=True)
net = timm.create_model("vit_tiny_patch16_224", img_size=32, embed_dim=48, depth=2, num_classes=3)
model = samestep.replicate(net.to(world.device))
optimizer = torch.optim.SGD(model.parameters(), 0.01)

for x, y in train:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {samestep.mean(loss.item()):.4f}")
