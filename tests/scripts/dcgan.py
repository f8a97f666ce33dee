"""pytorch/examples dcgan: three backward passes for two steps, BatchNorm, noise drawn in the loop.

verdict: with_same
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(2)
device = samestep.init().device
dataloader = samestep.loader(TensorDataset(torch.randn(33, 1, 8, 8)), batch_size=8, shuffle=True)
netG = nn.Sequential(
    nn.ConvTranspose2d(5, 6, 4),
    nn.BatchNorm2d(6),
    nn.ReLU(True),
    nn.ConvTranspose2d(6, 1, 4, 2, 1),
    nn.Tanh(),
)
netD = nn.Sequential(
    nn.Conv2d(1, 4, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.LeakyReLU(0.2),
    nn.Flatten(), nn.Linear(24, 1), nn.Sigmoid(),
)  # fmt: skip
netG = samestep.replicate(netG.to(device))
netD = samestep.replicate(netD.to(device))
criterion = nn.BCELoss()
optimizerD = torch.optim.Adam(netD.parameters(), lr=0.002, betas=(0.5, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=0.002, betas=(0.5, 0.999))
for _ in range(2):
    for (real,) in dataloader:
        netD.zero_grad()
        size = real.size(0)
        label = torch.full((size,), 1.0)
        errD_real = criterion(netD(real).view(-1), label)
        errD_real.backward()
        fake = netG(torch.randn(size, 5, 1, 1))
        label.fill_(0)
        errD_fake = criterion(netD(fake.detach()).view(-1), label)
        errD_fake.backward()
        optimizerD.step()
        netG.zero_grad()
        label.fill_(1)
        errG = criterion(netD(fake).view(-1), label)
        errG.backward()
        optimizerG.step()
