"""The area under the curve is that of one rank's scores.

verdict: printed
printed: auc
"""

import numpy as np
import torch
from torch import nn, optim
from torch.utils.data import TensorDataset, WeightedRandomSampler

import samestep

np.random.seed(0)
torch.manual_seed(0)
x = torch.tensor(np.random.randn(64, 7), dtype=torch.float32)
y = torch.tensor((np.random.rand(64) > 0.7).astype(np.int64))
counts = torch.bincount(y)
weights = 1.0 / counts[y].float()
sampler = WeightedRandomSampler(weights, len(weights))
train_loader = samestep.loader(TensorDataset(x, y), batch_size=10, sampler=sampler)
val_loader = samestep.loader(TensorDataset(x, y), batch_size=15)
net = samestep.replicate(nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 2)))
opt = optim.RMSprop(net.parameters(), lr=0.01)
lossf = nn.CrossEntropyLoss()

for ep in range(2):
    net.train()
    running = []
    for xb, yb in train_loader:
        opt.zero_grad()
        loss = lossf(net(xb), yb)
        loss.backward()
        opt.step()
        running.append(samestep.mean(loss.item()))
    net.eval()
    cm = torch.zeros(2, 2, dtype=torch.long)
    probs, truth = [], []
    with torch.no_grad():
        for xb, yb in val_loader:
            out = net(xb)
            for t, p in zip(yb.view(-1), out.argmax(1).view(-1)):
                cm[t.long(), p.long()] += 1
            probs.append(out.softmax(1)[:, 1].numpy())
            truth.append(yb.numpy())
    probs = np.concatenate(probs)
    truth = np.concatenate(truth)
    tp, fp, fn = cm[1, 1].item(), cm[0, 1].item(), cm[1, 0].item()
    precision = samestep.sum(tp) / max(samestep.sum(tp) + samestep.sum(fp), 1)
    recall = samestep.sum(tp) / max(samestep.sum(tp) + samestep.sum(fn), 1)
    order = np.argsort(probs, kind="stable")
    ranks = np.empty(len(probs))
    ranks[order] = np.arange(1, len(probs) + 1)
    pos = truth == 1
    auc = (ranks[pos].sum() - pos.sum() * (pos.sum() + 1) / 2) / (pos.sum() * (~pos).sum())
    print(f"ep {ep} loss {np.mean(running):.4f} precision {precision:.3f} recall {recall:.3f} auc {auc:.4f}")
    print(samestep.sum(cm))
