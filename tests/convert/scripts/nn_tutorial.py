import numpy as np
import torch
from torch import nn, optim
import torch.nn.functional as F
from torch.utils.data import TensorDataset, DataLoader

torch.manual_seed(1)
bs, lr, epochs = 8, 0.1, 2
x, y = torch.rand(40, 6), torch.randint(0, 3, (40,))
xv, yv = torch.rand(19, 6), torch.randint(0, 3, (19,))

def get_data(train_ds, valid_ds, bs):
    return (
        DataLoader(train_ds, batch_size=bs, shuffle=True),
        DataLoader(valid_ds, batch_size=bs * 2),
    )

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
        for xb, yb in train_dl:
            loss_batch(model, loss_func, xb, yb, opt)

        model.eval()
        with torch.no_grad():
            losses, nums = zip(
                *[loss_batch(model, loss_func, xb, yb) for xb, yb in valid_dl]
            )
        val_loss = np.sum(np.multiply(losses, nums)) / np.sum(nums)

        print(epoch, val_loss)

def get_model():
    model = nn.Linear(6, 3)
    return model, optim.SGD(model.parameters(), lr=lr)

train_dl, valid_dl = get_data(TensorDataset(x, y), TensorDataset(xv, yv), bs)
model, opt = get_model()
fit(epochs, model, F.cross_entropy, opt, train_dl, valid_dl)
