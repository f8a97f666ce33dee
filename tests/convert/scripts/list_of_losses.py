import logging, sys
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils import data

logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
log = logging.getLogger("train")
torch.manual_seed(32); np.random.seed(32)

net = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 1))
opt = optim.Adam(net.parameters(), 1e-2)
ds = data.TensorDataset(torch.randn(47, 6), torch.randn(47))
loader = data.DataLoader(ds, 10, shuffle=True)
val = data.DataLoader(data.TensorDataset(torch.randn(23, 6), torch.randn(23)), 10)

def step(batch):
    x, y = batch
    pred = net(x).squeeze(-1)
    loss = F.smooth_l1_loss(pred, y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    return loss.item()

@torch.no_grad()
def validate():
    net.eval()
    errors = []
    for x, y in val:
        errors.append((net(x).squeeze(-1) - y).abs())
    net.train()
    return torch.cat(errors).mean().item()

for epoch in range(3):
    losses = [step(b) for b in loader]
    log.info("epoch %d train %.5f mae %.5f", epoch, np.mean(losses), validate())
torch.save(net.state_dict(), "net.pt")
