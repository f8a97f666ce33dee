"""Nodes in batches: the graph is the same for all, the loss is over the nodes of the batch."""

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.utils.data

torch.manual_seed(7)
features, labels = torch.rand(24, 6), torch.randint(0, 3, (24,))
adjacency = (torch.rand(24, 24) < 0.2).float() + torch.eye(24)
adjacency = adjacency / adjacency.sum(1, keepdim=True)
loader = torch.utils.data.DataLoader(torch.arange(18), batch_size=8, shuffle=True)


class SAGE(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x, adjacency, nodes):
        x = F.relu(self.first(adjacency @ x))
        return self.second(adjacency @ x)[nodes]


model = SAGE()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(3):
    model.train()
    total_loss = total_correct = 0
    for nodes in loader:
        optimizer.zero_grad()
        out = model(features, adjacency, nodes)
        y = labels[nodes]
        loss = F.cross_entropy(out, y)
        loss.backward()
        optimizer.step()
        total_loss += float(loss) * nodes.numel()
        total_correct += int(out.argmax(dim=-1).eq(y).sum())
    model.eval()
    with torch.no_grad():
        right = model(features, adjacency, torch.arange(18, 24)).argmax(1) == labels[18:]
    print(
        f"Epoch: {epoch:02d}, Loss: {total_loss / 18:.4f}, Train: {total_correct / 18:.4f}, Val: {right.float().mean():.4f}"
    )
torch.save(model.state_dict(), "sage.pt")
