"""GraphSAGE: neighbours drawn for each node of the mini-batch, twice, in the loop."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(6)
samestep.init()
N = 50
features, labels = torch.randn(N, 5), torch.randint(0, 3, (N,))
neighbours = torch.randint(0, N, (N, 9))
train = samestep.loader(TensorDataset(torch.arange(40)), batch_size=9, shuffle=True)
test = samestep.loader(TensorDataset(torch.arange(40, N)), batch_size=6)


def sample(nodes, k):
    return neighbours[nodes].gather(-1, torch.randint(0, 9, (*nodes.shape, k)))


class SAGE(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer, self.drop = nn.Linear(10, 8), nn.Linear(16, 3), nn.Dropout(0.5)

    def forward(self, nodes, first, second):
        def layer(linear, own, near):
            return linear(torch.cat([own, near.mean(-2)], -1))

        h0 = self.drop(F.relu(layer(self.inner, features[nodes], features[first])))
        h1 = self.drop(F.relu(layer(self.inner, features[first], features[second])))
        return layer(self.outer, h0, h1)


model = samestep.replicate(SAGE(), same=True)
opt = torch.optim.Adam(model.parameters(), 1e-2)
for epoch in range(3):
    model.train()
    for (nodes,) in train:
        first = sample(nodes, 4)
        loss = F.cross_entropy(model(nodes, first, sample(first, 3)), labels[nodes])
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(samestep.mean(loss.item()))
    model.eval()
    right = 0
    with torch.no_grad():
        for (nodes,) in test:
            first = sample(nodes, 4)
            right += (model(nodes, first, sample(first, 3)).argmax(1) == labels[nodes]).sum().item()
    print(epoch, samestep.sum(right))
samestep.save("weights.pt", model.state_dict())
