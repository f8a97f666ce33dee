import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(1)
tl = DataLoader(TensorDataset(torch.rand(45, 4), torch.randint(0, 3, (45,))), batch_size=8, shuffle=True)
vl = DataLoader(TensorDataset(torch.rand(21, 4), torch.randint(0, 3, (21,))), batch_size=8)
net = nn.Linear(4, 3)
opt = torch.optim.SGD(net.parameters(), lr=.1)
crit = nn.CrossEntropyLoss()

def evaluate():
    net.eval()
    hits, n, loss = 0, 0, 0.0
    with torch.no_grad():
        for x, y in vl:
            out = net(x)
            hits, n = hits + (out.argmax(1) == y).sum().item(), n + len(y)
            loss += crit(out, y).item()
    net.train()
    return hits / n, loss / len(vl)

best = 0
for epoch in range(2):
    total, seen = 0., 0
    smooth = None
    for i, (x, y) in enumerate(tl):
        loss = crit(net(x), y)
        opt.zero_grad(); loss.backward(); opt.step()
        total, seen = total + loss.item() * len(x), seen + len(x)
        smooth = loss.item() + (smooth or 0.0)
        if i % 3 == 2:
            acc, vloss = evaluate()
            print(f"{epoch}/{i} acc {acc:.4f} loss {vloss:.5f} running {total / seen:.5f} {smooth:.5f}")
            if acc > best:
                best = acc
                torch.save(net.state_dict(), "best.pt")
    print("epoch", epoch, total / seen, smooth, evaluate()[0])
torch.save(net.state_dict(), "last.pt")
