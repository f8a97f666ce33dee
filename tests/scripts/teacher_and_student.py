"""A student learns from a frozen teacher: KLDivLoss with batchmean, LambdaLR warm-up for each step.

verdict: with_same
"""

import math

import torch
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(42)
world = samestep.init()
device = world.device
X = torch.randn(90, 12)
Y = (X[:, :4].sum(1) > 0).long() + (X[:, 4:8].sum(1) > 0).long()
train_ds, test_ds = TensorDataset(X[:64], Y[:64]), TensorDataset(X[64:], Y[64:])
train_dl = samestep.loader(train_ds, batch_size=12, shuffle=True)
test_dl = samestep.loader(test_ds, batch_size=8)

teacher = nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3)).to(device)
teacher.eval()
for p in teacher.parameters():
    p.requires_grad_(False)
student = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3)).to(device)
student = samestep.replicate(student)
opt = torch.optim.Adam(student.parameters(), lr=1e-2)
total_steps = 3 * len(train_dl)
sched = torch.optim.lr_scheduler.LambdaLR(
    opt, lambda s: min(1.0, (s + 1) / 4) * 0.5 * (1 + math.cos(math.pi * s / total_steps))
)
T, alpha = 4.0, 0.7
kd, ce = nn.KLDivLoss(reduction="batchmean"), nn.CrossEntropyLoss()
for epoch in range(3):
    student.train()
    running = 0.0
    for xb, yb in train_dl:
        with torch.no_grad():
            soft = (teacher(xb) / T).softmax(-1)
        logits = student(xb)
        loss = alpha * T * T * kd((logits / T).log_softmax(-1), soft) + (1 - alpha) * ce(logits, yb)
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        running += loss.item() * xb.size(0)
    student.eval()
    hits = 0
    with torch.no_grad():
        for xb, yb in test_dl:
            hits += (student(xb).argmax(1) == yb).sum().item()
    running, hits = samestep.sum(running), samestep.sum(hits)
    if world.rank == 0:
        print(f"Epoch {epoch + 1}: loss={running / len(train_ds):.4f} acc={hits / len(test_ds):.3f}")
