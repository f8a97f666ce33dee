"""Mean teacher: an averaged copy that drops out too, labelled and unlabelled samples in one batch, noise for both."""

import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset, WeightedRandomSampler

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(21)
samestep.init()
x, y = torch.randn(40, 6), torch.randint(0, 3, (40,))
y[25:] = -1
sampler = WeightedRandomSampler(torch.where(y < 0, 1.0, 2.0), 37)
train = samestep.loader(TensorDataset(x, y), batch_size=8, sampler=sampler)
student = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, 3))
teacher = copy.deepcopy(student).requires_grad_(False)
student = samestep.replicate(student, same=True, loss="sum")
teacher = samestep.replicate(teacher, same=True)
opt = torch.optim.Adam(student.parameters(), 1e-2)
step = 0
for _ in range(3):
    for x, y in train:
        logits = student(x + 0.1 * torch.randn_like(x))
        with torch.no_grad():
            target = teacher(x + 0.1 * torch.randn_like(x)).softmax(1)
        labelled, n = samestep.sum((y >= 0).sum().item()), samestep.sum(len(x))
        supervised = F.cross_entropy(logits, y, ignore_index=-1, reduction="sum") / max(labelled, 1)
        consistency = F.mse_loss(logits.softmax(1), target, reduction="sum") / n
        loss = supervised + min(1.0, step / 10) * consistency
        opt.zero_grad()
        loss.backward()
        opt.step()
        step += 1
        alpha = min(1 - 1 / (step + 1), 0.95)
        with torch.no_grad():
            for p, q in zip(teacher.parameters(), student.parameters()):
                p.mul_(alpha).add_(q, alpha=1 - alpha)
        print(samestep.sum(loss.item()))
samestep.save(
    "weights.pt", {**student.state_dict(), **{f"t.{k}": v for k, v in teacher.state_dict().items()}}
)
