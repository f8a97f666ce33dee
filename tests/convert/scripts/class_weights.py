import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

torch.manual_seed(23)
x, y = torch.randn(50, 6), torch.randint(0, 3, (50,))
counts = torch.bincount(y, minlength=3).float()
weights = 1.0 / counts
sampler = WeightedRandomSampler(weights[y], num_samples=len(y), replacement=True)
loader = DataLoader(TensorDataset(x, y), batch_size=9, sampler=sampler)
net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
criterion = nn.CrossEntropyLoss(weight=weights)
optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
for epoch in range(2):
    for xb, yb in loader:
        optimizer.zero_grad()
        logits = net(xb)
        loss = criterion(logits, yb)
        loss.backward()
        optimizer.step()
        print("%d %.5f" % (epoch, loss.item()))
torch.save(net.state_dict(), "weighted.pt")
