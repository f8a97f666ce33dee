"""Sums that one object holds by position, in a loop that a function written for several kinds of updates runs."""

import torch
from torch import nn
from torch.utils import data

torch.manual_seed(0)


class Sums:
    def __init__(self, count):
        self.held = [0.0] * count

    def add(self, *numbers):
        self.held = [old + float(new) for old, new in zip(self.held, numbers)]

    def __getitem__(self, at):
        return self.held[at]


class Curves:
    def __init__(self):
        self.xs, self.ys = [], []

    def add(self, x, ys):
        for y in ys:
            if y is not None:
                self.xs.append(x)
                self.ys.append(y)


def correct(scores, labels):
    if len(scores.shape) > 1 and scores.shape[1] > 1:
        scores = scores.argmax(axis=1)
    return float((scores.type(labels.dtype) == labels).type(labels.dtype).sum())


def evaluate(net, batches):
    if isinstance(net, nn.Module):
        net.eval()
    sums = Sums(2)
    with torch.no_grad():
        for x, y in batches:
            sums.add(correct(net(x), y), y.numel())
    return sums[0] / sums[1]


def train_epoch(net, batches, loss, updater):
    if isinstance(net, nn.Module):
        net.train()
    sums = Sums(3)
    for x, y in batches:
        scores = net(x)
        each = loss(scores, y)
        if isinstance(updater, torch.optim.Optimizer):
            updater.zero_grad()
            each.mean().backward()
            updater.step()
        else:
            each.sum().backward()
            updater(x.shape[0])
        sums.add(float(each.sum()), correct(scores, y), y.numel())
    return sums[0] / sums[2], sums[1] / sums[2]


def train_showing(net, batches, optimizer, curves, epoch):
    loss, count, sums = nn.CrossEntropyLoss(), len(batches), Sums(3)
    net.train()
    for i, (x, y) in enumerate(batches):
        optimizer.zero_grad()
        scores = net(x)
        mean = loss(scores, y)
        mean.backward()
        optimizer.step()
        with torch.no_grad():
            sums.add(mean * x.shape[0], correct(scores, y), x.shape[0])
        shown = sums[0] / sums[2], sums[1] / sums[2]
        if (i + 1) % (count // 3) == 0 or i == count - 1:
            curves.add(epoch + (i + 1) / count, (*shown, None))
    return shown


x = torch.randn(301, 12)
y = x[:, :4].argmax(1)
net = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 4))
batches = data.DataLoader(data.TensorDataset(x[:201], y[:201]), 32, shuffle=True)
held = data.DataLoader(data.TensorDataset(x[201:], y[201:]), 32)
optimizer, curves = torch.optim.SGD(net.parameters(), lr=0.1), Curves()
for epoch in range(2):
    print(epoch, train_epoch(net, batches, nn.CrossEntropyLoss(reduction="none"), optimizer), evaluate(net, held))
    print(epoch, train_showing(net, batches, optimizer, curves, epoch), evaluate(net, held))
print(f"{sum(curves.ys):.4f}")
