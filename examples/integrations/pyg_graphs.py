"""Classifies graphs of PyTorch Geometric, whose own DataLoader joins the graphs of a batch."""

import torch
import torch.nn.functional as F
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCNConv, global_mean_pool

import samestep


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = GCNConv(6, 16), torch.nn.Linear(16, 2)

    def forward(self, x, edge_index, batch):
        hidden = global_mean_pool(self.conv(x, edge_index).relu(), batch)
        return self.head(F.dropout(hidden, 0.3, self.training))


world = samestep.init()
torch.manual_seed(0)
graphs = []
for nodes in torch.randint(5, 12, (90,)).tolist():
    x, edges = torch.randn(nodes, 6), torch.randint(nodes, (2, 3 * nodes))
    graphs.append(Data(x=x, edge_index=edges, y=(x[:, :1].mean(0) > 0).long()))
train = samestep.loader(DataLoader(graphs, batch_size=16, shuffle=True))
model = samestep.replicate(Net().to(world.device), same=True)
optimizer = torch.optim.Adam(model.parameters(), 0.01)

for _ in range(3):
    total = 0.0
    for batch in train:
        loss = F.cross_entropy(model(batch.x, batch.edge_index, batch.batch), batch.y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += samestep.mean(loss.item()) * samestep.sum(batch.num_graphs)
    print(f"loss {total / len(graphs):.4f}")
