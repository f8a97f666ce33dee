import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


class MetricTracker:
    def __init__(self, *keys):
        self._data = {k: {"total": 0.0, "counts": 0, "average": 0.0} for k in keys}

    def reset(self):
        for key in self._data:
            self._data[key] = {"total": 0.0, "counts": 0, "average": 0.0}

    def update(self, key, value, n=1):
        self._data[key]["total"] += value * n
        self._data[key]["counts"] += n
        self._data[key]["average"] = self._data[key]["total"] / self._data[key]["counts"]

    def result(self):
        return {k: v["average"] for k, v in self._data.items()}


torch.manual_seed(31)
x, y = torch.randn(50, 6), torch.randint(0, 3, (50,))
model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
opt = torch.optim.Adam(model.parameters(), lr=0.02)
data_loader = DataLoader(TensorDataset(x, y), batch_size=12, shuffle=True)
criterion = nn.CrossEntropyLoss()
train_metrics = MetricTracker("loss", "accuracy")
for epoch in range(1, 4):
    train_metrics.reset()
    for batch_idx, (data, target) in enumerate(data_loader):
        opt.zero_grad()
        output = model(data)
        loss = criterion(output, target)
        loss.backward()
        opt.step()
        train_metrics.update("loss", loss.item(), len(data))
        train_metrics.update("accuracy", (output.argmax(1) == target).sum().item() / len(target), len(data))
        if batch_idx % 2 == 0:
            print(f"Train Epoch: {epoch} [{batch_idx * data_loader.batch_size}/{len(x)}] Loss: {loss.item():.6f}")
    log = {"epoch": epoch}
    log.update(train_metrics.result())
    for key, value in log.items():
        print("    {:15s}: {}".format(str(key), value))
torch.save(model.state_dict(), "tracked.pt")
