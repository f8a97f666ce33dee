"""A graph network over one whole graph, with batches of node indices: dropout on all nodes is one draw for all."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(7)
world = samestep.init()
features, labels = torch.rand(24, 6), torch.randint(0, 3, (24,))
adjacency = (torch.rand(24, 24) < 0.2).double() + torch.eye(24)
adjacency = adjacency / adjacency.sum(1, keepdim=True)
train = samestep.loader(TensorDataset(torch.arange(18)), batch_size=8, shuffle=True)


class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x, adjacency, chosen):
        x = F.dropout(x, 0.2, self.training)
        x = F.dropout(F.relu(self.first(adjacency @ x)), 0.5, self.training)
        return self.second(adjacency @ x)[chosen]


model = samestep.replicate(GCN().to(world.device), same=True)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(3):
    model.train()
    for (chosen,) in train:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(features, adjacency, chosen), labels[chosen])
        loss.backward()
        optimizer.step()
        print("loss", samestep.mean(loss.item()))
    model.eval()
    with torch.no_grad():
        right = model(features, adjacency, torch.arange(18, 24)).argmax(1) == labels[18:]
    print(epoch, right.double().mean().item())
samestep.save("weights.pt", model.state_dict())
