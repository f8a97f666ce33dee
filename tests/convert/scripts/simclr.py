import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(26)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 6))

    def forward(self, x):
        return F.normalize(self.net(x), dim=1)


loader = DataLoader(
    TensorDataset(torch.randn(48, 8), torch.randn(48, 8)), batch_size=12, shuffle=True, drop_last=True
)
encoder = Encoder()
optimizer = torch.optim.Adam(encoder.parameters(), lr=0.01)
for epoch in range(2):
    for a, b in loader:
        z1 = encoder(a)
        z2 = encoder(b)
        logits = z1 @ z2.t() / 0.5
        targets = torch.arange(len(a))
        loss = F.cross_entropy(logits, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(epoch, f"{loss.item():.5f}")
torch.save(encoder.state_dict(), "encoder.pt")
