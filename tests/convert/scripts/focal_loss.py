import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class FocalLoss(nn.Module):
    def __init__(self, gamma=2.0, alpha=None, reduction="mean"):
        super().__init__()
        self.gamma, self.alpha, self.reduction = gamma, alpha, reduction

    def forward(self, logits, target):
        ce = F.cross_entropy(logits, target, reduction="none")
        pt = torch.exp(-ce)
        loss = (1 - pt) ** self.gamma * ce
        if self.alpha is not None:
            loss = self.alpha[target] * loss
        if self.reduction == "mean":
            return loss.mean()
        elif self.reduction == "sum":
            return loss.sum()
        return loss


class LabelSmooth(nn.Module):
    def __init__(self, eps=0.1):
        super().__init__()
        self.eps = eps

    def forward(self, logits, target):
        n = logits.size(-1)
        logp = F.log_softmax(logits, dim=-1)
        smooth = -logp.sum(dim=-1).mean()
        return (1 - self.eps) * F.nll_loss(logp, target) + self.eps * smooth / n


def mixture(logits, target):
    return 0.5 * focal(logits, target) + 0.5 * smooth(logits, target)


torch.manual_seed(0)
focal, smooth = FocalLoss(alpha=torch.tensor([1.0, 2.0, 0.5])), LabelSmooth()
X, Y = torch.randn(76, 6), torch.randint(0, 3, (76,))
tr = DataLoader(TensorDataset(X[:50], Y[:50]), batch_size=8, shuffle=True)
te = DataLoader(TensorDataset(X[50:], Y[50:]), batch_size=8)
model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    tot, cnt = torch.zeros(()), 0
    for x, y in tr:
        out = model(x)
        loss = mixture(out, y)
        l2 = sum((p ** 2).sum() for p in model.parameters())
        l1 = sum(p.abs().sum() for p in model.parameters())
        total = loss + 1e-3 * l2 + 1e-4 * l1
        opt.zero_grad()
        total.backward()
        opt.step()
        tot += total.detach() * x.size(0)
        cnt += x.size(0)
    with torch.no_grad():
        val = [mixture(model(x), y) * y.numel() for x, y in te]
        n = sum(y.numel() for _, y in te)
    print(f"{epoch} train {tot / cnt:.4f} val {sum(val) / n:.4f}")
