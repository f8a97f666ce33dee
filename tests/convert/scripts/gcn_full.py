import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(42)
features, labels = torch.rand(24, 6), torch.randint(0, 3, (24,))
adj = torch.eye(24)
idx_train, idx_val = torch.arange(16), torch.arange(16, 24)


class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.gc1, self.gc2 = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x, adj):
        x = F.dropout(F.relu(self.gc1(adj @ x)), 0.5, training=self.training)
        return F.log_softmax(self.gc2(adj @ x), dim=1)


model = GCN()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
for epoch in range(3):
    model.train()
    optimizer.zero_grad()
    output = model(features, adj)
    loss_train = F.nll_loss(output[idx_train], labels[idx_train])
    loss_train.backward()
    optimizer.step()
    print(f"Epoch: {epoch + 1:04d}", f"loss_train: {loss_train.item():.4f}")
