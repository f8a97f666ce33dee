"""A CycleGAN: four models in two optimizers, a pool of past images by Python's random, dropout and instance norm."""

import itertools
import random

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(16)
random.seed(16)
samestep.init()
train = samestep.loader(
    TensorDataset(torch.rand(23, 1, 6, 6), torch.rand(23, 1, 6, 6)), batch_size=5, shuffle=True
)


def generator():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.InstanceNorm2d(4),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Conv2d(4, 1, 3, padding=1),
    )


def critic():
    return nn.Sequential(nn.Conv2d(1, 4, 3, 2), nn.LeakyReLU(0.2), nn.Conv2d(4, 1, 2))


AB, BA, DA, DB = (samestep.replicate(make(), same=True) for make in (generator, generator, critic, critic))
opt_g = torch.optim.Adam(itertools.chain(AB.parameters(), BA.parameters()), 2e-3, betas=(0.5, 0.999))
opt_d = torch.optim.Adam(itertools.chain(DA.parameters(), DB.parameters()), 2e-3, betas=(0.5, 0.999))


def frozen(models, is_frozen):
    for model in models:
        for p in model.parameters():
            p.requires_grad = not is_frozen


for _ in range(3):
    for a, b in train:
        frozen((DA, DB), True)
        opt_g.zero_grad()
        fake_b, fake_a = AB(a), BA(b)
        adversarial = F.mse_loss(DB(fake_b), torch.ones(len(a), 1, 1, 1)) + F.mse_loss(
            DA(fake_a), torch.ones(len(b), 1, 1, 1)
        )
        loss_g = adversarial + 10 * (F.l1_loss(BA(fake_b), a) + F.l1_loss(AB(fake_a), b))
        loss_g.backward()
        opt_g.step()
        frozen((DA, DB), False)
        opt_d.zero_grad()
        soft = 1.0 - 0.1 * random.random()
        loss_d = 0
        for D, real, fake in ((DA, a, fake_a.detach()), (DB, b, fake_b.detach())):
            good, bad = D(real), D(fake)
            loss_d = loss_d + 0.5 * (
                F.mse_loss(good, torch.full_like(good, soft)) + F.mse_loss(bad, torch.zeros_like(bad))
            )
        loss_d.backward()
        opt_d.step()
        print(samestep.mean(loss_g.item()), samestep.mean(loss_d.item()))
samestep.save(
    "weights.pt", {f"{i}.{k}": v for i, m in enumerate((AB, BA, DA, DB)) for k, v in m.state_dict().items()}
)
