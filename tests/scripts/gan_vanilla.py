"""yunjey's GAN: real and fake losses added, one backward each for two models; scores in progress lines.

verdict: with_same
remark: d_loss
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(4)
samestep.init()
data_loader = samestep.loader(TensorDataset(torch.randn(32, 6)), batch_size=8, shuffle=True)
D = samestep.replicate(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1), nn.Sigmoid()))
G = samestep.replicate(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 6)))
d_optimizer = torch.optim.Adam(D.parameters(), lr=0.002)
g_optimizer = torch.optim.Adam(G.parameters(), lr=0.002)


def reset_grad():
    d_optimizer.zero_grad()
    g_optimizer.zero_grad()


for epoch in range(2):
    for i, (images,) in enumerate(data_loader):
        ones, zeros = torch.ones(len(images), 1), torch.zeros(len(images), 1)
        d_loss_real = F.binary_cross_entropy(D(images), ones)
        fake = G(torch.randn(len(images), 3))
        d_loss = d_loss_real + F.binary_cross_entropy(D(fake.detach()), zeros)
        reset_grad()
        d_loss.backward()
        d_optimizer.step()
        g_loss = F.binary_cross_entropy(D(G(torch.randn(len(images), 3))), ones)
        reset_grad()
        g_loss.backward()
        g_optimizer.step()
        if i % 2 == 0:
            print(f"Epoch {epoch}, d_loss: {d_loss.item():.4f}, g_loss: {g_loss.item():.4f}")
