"""A model that goes through its samples one by one and stacks what it made of them, with dropout behind."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(31)
world = samestep.init()
data = TensorDataset(torch.randn(25, 4, 5), torch.randint(0, 3, (25,)))
train = samestep.loader(data, batch_size=6, shuffle=True)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.text, self.head = nn.Linear(5, 3), nn.Linear(5, 3), nn.Linear(3, 3)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x):
        first = torch.stack([self.words(x[at]).amax(0) for at in range(x.size(0))], 1)
        second = torch.stack([self.text(sample.mean(0)) for sample in x])
        return self.head(self.dropout(first).t() + torch.native_dropout(second, 0.3, True)[0])


model = samestep.replicate(Net().to(world.device), same=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    for x, y in train:
        x = x + torch.randn_like(x[0])
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        print(epoch, samestep.mean(loss.item()))
samestep.save("weights.pt", model.state_dict())
