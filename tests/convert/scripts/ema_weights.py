import copy
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class ModelEMA:
    def __init__(self, model, decay=0.9):
        self.module = copy.deepcopy(model).eval()
        self.decay = decay
        for p in self.module.parameters():
            p.requires_grad_(False)

    @torch.no_grad()
    def update(self, model):
        for ema_v, model_v in zip(self.module.state_dict().values(), model.state_dict().values()):
            ema_v.copy_(self.decay * ema_v + (1 - self.decay) * model_v)


def accuracy(net, loader):
    net.eval()
    hits = total = 0
    for xb, yb in loader:
        with torch.no_grad():
            hits += int((net(xb).argmax(1) == yb).sum())
        total += len(xb)
    return hits / total


torch.manual_seed(38)
train = DataLoader(TensorDataset(torch.randn(50, 6), torch.randint(0, 2, (50,))), batch_size=12, shuffle=True, drop_last=True)
held = DataLoader(TensorDataset(torch.randn(31, 6), torch.randint(0, 2, (31,))), batch_size=10)
model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
ema = ModelEMA(model)
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(2):
    model.train()
    for xb, yb in train:
        opt.zero_grad()
        nn.functional.cross_entropy(model(xb), yb).backward()
        opt.step()
        ema.update(model)
    print(epoch, accuracy(model, held), accuracy(ema.module, held))
torch.save({'model': model.state_dict(), 'ema': ema.module.state_dict()}, 'both.pt')
