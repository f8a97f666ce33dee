import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def f1(preds, labels):
    tp = sum(1 for p, l in zip(preds, labels) if p == 1 and l == 1)
    fp = sum(1 for p, l in zip(preds, labels) if p == 1 and l == 0)
    fn = sum(1 for p, l in zip(preds, labels) if p == 0 and l == 1)
    return 2 * tp / max(2 * tp + fp + fn, 1)


torch.manual_seed(25)
x = torch.randn(80, 5)
y = (x[:, 0] + 0.5 * torch.randn(80) > 0).long()
train_dl = DataLoader(TensorDataset(x[:50], y[:50]), batch_size=8, shuffle=True)
val_dl = DataLoader(TensorDataset(x[50:], y[50:]), batch_size=8)
model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(3):
    model.train()
    for xb, yb in train_dl:
        loss = nn.functional.cross_entropy(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    all_preds, all_labels, scores = [], [], []
    with torch.no_grad():
        for xb, yb in val_dl:
            out = model(xb)
            all_preds.extend(out.argmax(1).tolist())
            all_labels.extend(yb.tolist())
            scores.append(out.softmax(1)[:, 1])
    print(epoch, "f1 %.4f" % f1(all_preds, all_labels), "mean score %.5f" % torch.cat(scores).mean().item())
torch.save(model.state_dict(), "f1.pt")
