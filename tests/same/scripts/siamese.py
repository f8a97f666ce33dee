"""A siamese network with BatchNorm: one model called twice in a forward, a contrastive loss, clipping."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(3)
world = samestep.init()
pairs = TensorDataset(torch.rand(43, 1, 8, 8), torch.rand(43, 1, 8, 8), torch.randint(0, 2, (43,)).double())
train_set, test_set = torch.utils.data.random_split(pairs, [32, 11])
train = samestep.loader(train_set, batch_size=6, shuffle=True)
test = samestep.loader(test_set, batch_size=5)


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(45, 12),
            nn.BatchNorm1d(12),
        )  # fmt: skip
        self.head = nn.Sequential(nn.Linear(24, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1))

    def forward(self, first, second):
        return self.head(torch.cat([self.body(first), self.body(second)], 1)).squeeze(1)


model = samestep.replicate(Siamese().to(world.device), same=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for epoch in range(3):
    model.train()
    for first, second, alike in train:
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(model(first, second), alike)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        print("loss", samestep.mean(loss.item()))
    model.eval()
    with torch.no_grad():
        right = sum(int(((model(a, b) > 0) == (c > 0.5)).sum()) for a, b, c in test)
    print(epoch, samestep.sum(right) / len(test.dataset))
samestep.save("weights.pt", model.state_dict())
