import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.randn(50, 5)
y = (x @ torch.randn(5, 1)).tanh() + 0.1 * torch.randn(50, 1)
loader = DataLoader(TensorDataset(x, y), batch_size=25, shuffle=True)
net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
opt = torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
crit = nn.MSELoss()
for epoch in range(3):
    for xb, yb in loader:

        def closure():
            opt.zero_grad()
            loss = crit(net(xb), yb)
            loss.backward()
            return loss

        last = opt.step(closure)
    print("epoch", epoch, "loss", float(last))
torch.save(net.state_dict(), "net.pt")
