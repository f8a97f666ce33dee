import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


class Accuracy:
    def __init__(self):
        self.reset()

    def reset(self):
        self.correct = 0
        self.total = 0

    def update(self, logits, targets):
        self.correct += (logits.argmax(dim=1) == targets).sum().item()
        self.total += targets.numel()

    def compute(self):
        return self.correct / self.total


class RunningMean:
    def __init__(self):
        self.n = 0
        self.s = 0.0

    def add(self, value, k=1):
        self.s += value * k
        self.n += k

    @property
    def value(self):
        return self.s / self.n if self.n else 0.0


torch.manual_seed(40)
train_dl = DataLoader(TensorDataset(torch.randn(44, 4), torch.randint(0, 3, (44,))), batch_size=10, shuffle=True)
test_dl = DataLoader(TensorDataset(torch.randn(27, 4), torch.randint(0, 3, (27,))), batch_size=10)
net = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 3))
optim = torch.optim.Adam(net.parameters(), lr=0.02)
loss_fn = nn.CrossEntropyLoss()
acc = Accuracy()
for epoch in range(2):
    net.train()
    acc.reset()
    mean = RunningMean()
    for x, y in train_dl:
        out = net(x)
        loss = loss_fn(out, y)
        optim.zero_grad()
        loss.backward()
        optim.step()
        acc.update(out, y)
        mean.add(loss.item(), len(y))
    print(f"{epoch} train loss {mean.value:.4f} acc {acc.compute():.4f}")
    net.eval()
    acc.reset()
    mean = RunningMean()
    with torch.no_grad():
        for x, y in test_dl:
            out = net(x)
            acc.update(out, y)
            mean.add(loss_fn(out, y).item(), len(y))
    print(f"{epoch} test loss {mean.value:.4f} acc {acc.compute():.4f}")
torch.save(net.state_dict(), "net.pt")
