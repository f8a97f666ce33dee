"""pytorch/examples siamese: one network is called twice before one backward.

verdict: same
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import samestep


class SiameseNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        self.head = nn.Sequential(nn.Linear(16, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, first, second):
        return torch.sigmoid(self.head(torch.cat((self.body(first), self.body(second)), 1)))


torch.manual_seed(0)
samestep.init()
pairs = TensorDataset(torch.randn(40, 6), torch.randn(40, 6), torch.randint(0, 2, (40,)).float())
train_loader = samestep.loader(pairs, 8, shuffle=True)
test_loader = samestep.loader(pairs, 8)
model = samestep.replicate(SiameseNetwork())
optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
for _ in range(2):
    for first, second, target in train_loader:
        optimizer.zero_grad()
        loss = nn.BCELoss()(model(first, second).squeeze(), target)
        loss.backward()
        optimizer.step()
    correct = 0
    with torch.no_grad():
        for first, second, target in test_loader:
            pred = torch.where(model(first, second).squeeze(1) > 0.5, 1, 0)
            correct += pred.eq(target.view_as(pred)).sum().item()
    print(f"Accuracy: {samestep.sum(correct)}/{len(pairs)}")
