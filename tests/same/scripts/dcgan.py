"""DCGAN: two models with BatchNorm, noise drawn in the loop, two backward passes for the critic and one more."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(2)
world = samestep.init()
train = samestep.loader(TensorDataset(torch.randn(41, 1, 8, 8)), batch_size=9, shuffle=True)
generator = nn.Sequential(
    nn.ConvTranspose2d(6, 8, 4), nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 1, 4, 2, 1), nn.Tanh()
)
critic = nn.Sequential(
    nn.Conv2d(1, 6, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(6, 8, 3), nn.BatchNorm2d(8), nn.LeakyReLU(0.2),
    nn.Dropout2d(0.3), nn.Flatten(), nn.Linear(32, 1), nn.Sigmoid(),
)  # fmt: skip
generator = samestep.replicate(generator.to(world.device), same=True)
critic = samestep.replicate(critic.to(world.device), same=True)
fixed = torch.randn(7, 6, 1, 1)
judge = nn.BCELoss()
critics = torch.optim.Adam(critic.parameters(), lr=0.002, betas=(0.5, 0.999))
generators = torch.optim.Adam(generator.parameters(), lr=0.002, betas=(0.5, 0.999))
for epoch in range(3):
    for (real,) in train:
        critic.zero_grad()
        real_loss = judge(critic(real).view(-1), torch.ones(len(real)))
        real_loss.backward()
        noise = torch.randn(len(real), 6, 1, 1)
        fake = generator(noise)
        fake_loss = judge(critic(fake.detach()).view(-1), torch.zeros(len(real)))
        fake_loss.backward()
        critics.step()
        generator.zero_grad()
        loss = judge(critic(fake).view(-1), torch.ones(len(real)))
        loss.backward()
        generators.step()
        print(samestep.mean(real_loss.item()), samestep.mean(fake_loss.item()), samestep.mean(loss.item()))
    generator.eval()
    with torch.no_grad():
        print(epoch, generator(fixed).std().item())
    generator.train()
samestep.save(
    "weights.pt", {**generator.state_dict(), **{f"critic.{k}": v for k, v in critic.state_dict().items()}}
)
