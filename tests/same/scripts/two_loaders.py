"""Labelled and unlabelled batches from two loaders in a zip, with a teacher that is a moving average."""

import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(21)
world = samestep.init()
labelled = samestep.loader(
    TensorDataset(torch.randn(40, 6), torch.randint(0, 3, (40,))), batch_size=10, shuffle=True
)
unlabelled = samestep.loader(TensorDataset(torch.randn(40, 6)), batch_size=10, shuffle=True)
student = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3)).to(world.device)
student = samestep.replicate(student, same=True)
teacher = copy.deepcopy(student)
optimizer = torch.optim.Adam(student.parameters(), lr=0.01)
for epoch in range(3):
    for (x, y), (u,) in zip(labelled, unlabelled, strict=True):
        with torch.no_grad():
            guess = teacher(u + 0.1 * torch.randn_like(u)).softmax(1)
        optimizer.zero_grad()
        loss = F.cross_entropy(student(x), y) + F.mse_loss(student(u).softmax(1), guess)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
        print(epoch, samestep.mean(loss.item(), weight=len(x)))
samestep.save("weights.pt", student.state_dict())
