import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class WrappedDataLoader:
    def __init__(self, dl, func):
        self.dl = dl
        self.func = func

    def __len__(self):
        return len(self.dl)

    def __iter__(self):
        for b in self.dl:
            yield self.func(*b)


def preprocess(x, y):
    return x.view(-1, 1, 3, 3), y


def loss_batch(model, loss_func, xb, yb, opt=None):
    loss = loss_func(model(xb), yb)
    if opt is not None:
        loss.backward()
        opt.step()
        opt.zero_grad()
    return loss.item(), len(xb)


def fit(epochs, model, loss_func, opt, train_dl, valid_dl):
    for epoch in range(epochs):
        model.train()
        tot, n = 0.0, 0
        for xb, yb in train_dl:
            l, c = loss_batch(model, loss_func, xb, yb, opt)
            tot += l * c
            n += c
        model.eval()
        with torch.no_grad():
            vt, vn = 0.0, 0
            for xb, yb in valid_dl:
                l, c = loss_batch(model, loss_func, xb, yb)
                vt += l * c
                vn += c
        print(epoch, "%.5f" % (tot / n), "%.5f" % (vt / vn))


torch.manual_seed(0)
x = torch.randn(76, 9)
y = (x.mean(1) > 0).long()
train_ds, valid_ds = random_split(TensorDataset(x, y), [50, 26])
train_dl = WrappedDataLoader(DataLoader(train_ds, batch_size=8, shuffle=True), preprocess)
valid_dl = WrappedDataLoader(DataLoader(valid_ds, batch_size=16), preprocess)
model = nn.Sequential(nn.Conv2d(1, 4, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
fit(2, model, nn.functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), train_dl, valid_dl)
