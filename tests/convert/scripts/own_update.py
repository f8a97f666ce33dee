import torch, numpy as np
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
np.random.seed(0); torch.manual_seed(0)
X = torch.tensor(np.random.randn(60, 3), dtype=torch.float32); Y = (X.sum(1, keepdim=True) > 0).float()
loader = DataLoader(TensorDataset(X, Y), batch_size=12, shuffle=True)
class LR(nn.Module):
    def __init__(self):
        super().__init__(); self.w = nn.Parameter(torch.zeros(3, 1)); self.b = nn.Parameter(torch.zeros(1))
    def forward(self, x): return torch.sigmoid(x @ self.w + self.b)
model = LR()
lossf = nn.BCELoss()
for ep in range(3):
    for xb, yb in loader:
        loss = lossf(model(xb), yb)
        model.zero_grad(); loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.5 * p.grad
    full = lossf(model(X), Y).item()
    print(f"{ep}: batch {loss.item():.4f} full {full:.4f} acc {((model(X) > .5) == Y.bool()).float().mean().item():.3f}")
torch.save(model.state_dict(), "lr.pt")
