"""Graphs laid end to end by collate_fn into an object: dropout for each node, each edge and each graph; BatchNorm."""

import torch
from torch import nn
from torch.nn import functional as F

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(5)
world = samestep.init()


class Graphs:
    def __init__(self, x, edges, of, y):
        self.x, self.edges, self.of, self.y = x, edges, of, y

    def to(self, device):
        return Graphs(*(tensor.to(device) for tensor in (self.x, self.edges, self.of, self.y)))


def graph():
    nodes, edges = int(torch.randint(3, 9, ())), int(torch.randint(2, 12, ()))
    return torch.randn(nodes, 6), torch.randint(0, nodes, (2, edges)), torch.randn(1)


def end_to_end(graphs):
    starts = torch.tensor([0] + [len(x) for x, _, _ in graphs]).cumsum(0)
    of = [torch.full((len(x),), at) for at, (x, _, _) in enumerate(graphs)]
    edges = [pairs + start for (_, pairs, _), start in zip(graphs, starts, strict=False)]
    x, _, y = zip(*graphs, strict=True)
    return Graphs(torch.cat(x), torch.cat(edges, 1), torch.cat(of), torch.stack(y))


train = samestep.loader([graph() for _ in range(29)], batch_size=8, shuffle=True, collate_fn=end_to_end)


class Attention(nn.Module):
    def __init__(self, wide, out):
        super().__init__()
        self.line, self.heads = nn.Linear(wide, out), nn.Linear(2 * out, 2)

    def forward(self, x, edges):
        x = self.line(x)
        source, target = edges
        weights = torch.sigmoid(self.heads(torch.cat([x[source], x[target]], 1)))
        weights = F.dropout(weights, 0.4, self.training)
        messages = (x[source].view(len(source), 2, -1) * weights[..., None]).flatten(1)
        return x + torch.zeros_like(x).index_add_(0, target, messages)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.norm = Attention(6, 8), Attention(8, 8), nn.BatchNorm1d(8)
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(8, 1)

    def forward(self, graphs):
        x = self.drop(F.relu(self.norm(self.first(graphs.x, graphs.edges))))
        x = F.dropout(F.relu(self.second(x, graphs.edges)), 0.2, self.training)
        pooled = torch.zeros(len(graphs.y), 8).index_add_(0, graphs.of, x)
        return self.head(F.dropout(pooled, 0.1, self.training))


model = samestep.replicate(Net().to(world.device), same=True)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for _ in range(3):
    for graphs in train:
        optimizer.zero_grad()
        noisy = graphs.y + 0.1 * torch.randn_like(graphs.y)
        loss = F.mse_loss(model(graphs), noisy)
        loss.backward()
        optimizer.step()
        print("loss", samestep.mean(loss.item()))
samestep.save("weights.pt", model.state_dict())
