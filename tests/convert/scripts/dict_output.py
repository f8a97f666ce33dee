import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import numpy as np
torch.manual_seed(1)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 3)
    def forward(self, input_ids, labels=None):
        logits = self.l(input_ids)
        out = {"logits": logits}
        if labels is not None:
            out["loss"] = nn.functional.cross_entropy(logits, labels)
        return out
total_loss = 0.0
def train_one(model, dl, opt):
    global total_loss
    for step, (x, y) in enumerate(dl):
        out = model(x, labels=y)
        out["loss"].backward()
        opt.step(); opt.zero_grad()
        total_loss += out["loss"].item()
dl = DataLoader(TensorDataset(torch.rand(30, 4), torch.randint(0, 3, (30,))), batch_size=7)
m = Model()
opt = torch.optim.SGD(m.parameters(), lr=.1)
results = {}
curve = np.zeros(len(dl))
for epoch in range(2):
    train_one(m, dl, opt)
    with torch.no_grad():
        for i, (x, y) in enumerate(dl):
            curve[i] = m(x, labels=y)["loss"].item()
    results["loss"] = total_loss / len(dl)
    results["curve"] = curve.mean()
    print(results)
    print(epoch, total_loss, curve.mean())
    total_loss = 0
