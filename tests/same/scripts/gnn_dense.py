"""A graph network over a dense adjacency of each sample, with dropout on nodes and on edges."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(6)
world = samestep.init()
nodes, edges = torch.rand(38, 5, 6), (torch.rand(38, 5, 5) < 0.5).double()
graphs = TensorDataset(nodes, edges, torch.randint(0, 3, (38,)))
train = samestep.loader(graphs, batch_size=10, shuffle=True)
test = samestep.loader(graphs, batch_size=10)


class GNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x, adjacency):
        adjacency = F.dropout(adjacency, 0.2, self.training) + torch.eye(5)
        x = F.relu(self.first(adjacency @ x))
        x = F.dropout(x, 0.5, self.training)
        x = F.relu(self.second(adjacency @ x)).reshape(-1, 8)
        x = F.dropout(x, 0.3, self.training).view(len(adjacency), 5, 8)
        return self.head(x.mean(1))


model = samestep.replicate(GNN().to(world.device), same=True)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
for epoch in range(3):
    model.train()
    for x, adjacency, y in train:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x, adjacency), y)
        loss.backward()
        optimizer.step()
        print("loss", samestep.mean(loss.item()))
    model.eval()
    with torch.no_grad():
        right = sum(int((model(x, a).argmax(1) == y).sum()) for x, a, y in test)
    print(epoch, samestep.sum(right) / len(test.dataset))
samestep.save("weights.pt", model.state_dict())
