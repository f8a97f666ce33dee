import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset
import csv

class AvgMeter:
    def __init__(self): self.reset()
    def reset(self): self.val = 0; self.sum = 0; self.n = 0
    def update(self, v, k=1): self.val = v; self.sum += v * k; self.n += k
    @property
    def avg(self): return self.sum / max(self.n, 1)
    def __repr__(self): return f"{self.avg:.4f}"

def topk(output, target, k=2):
    _, pred = output.topk(k, 1)
    return pred.eq(target.view(-1, 1)).any(1).float().sum().item()

def loop(model, dl, opt=None):
    meters = {"loss": AvgMeter(), "top2": AvgMeter()}
    for x, y in dl:
        o = model(x)
        l = nn.functional.cross_entropy(o, y)
        if opt:
            opt.zero_grad(); l.backward(); opt.step()
        meters["loss"].update(l.item(), len(x))
        meters["top2"].update(topk(o, y) / len(x), len(x))
    return {k: m.avg for k, m in meters.items()}

torch.manual_seed(0)
tr = DataLoader(TensorDataset(torch.randn(40, 5), torch.randint(0, 4, (40,))), 9, shuffle=True)
te = DataLoader(TensorDataset(torch.randn(22, 5), torch.randint(0, 4, (22,))), 9)
net = nn.Linear(5, 4)
opt = torch.optim.SGD(net.parameters(), 0.1)
with open("log.csv", "w", newline="") as f:
    w = csv.writer(f)
    for e in range(2):
        net.train(); a = loop(net, tr, opt)
        net.eval()
        with torch.no_grad(): b = loop(net, te)
        w.writerow([e, a["loss"], b["loss"]])
        print(e, a, b)
torch.save(net.state_dict(), "n.pt")
