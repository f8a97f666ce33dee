import csv
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset


class Test(Dataset):
    def __init__(self, x):
        self.x = x
        self.ids = [f"img_{i:03d}" for i in range(len(x))]

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.ids[i]


class Train(Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


torch.manual_seed(0)
x = torch.randn(70, 6)
y = x[:, :3].argmax(1)
train = DataLoader(Train(x[:50], y[:50]), batch_size=8, shuffle=True)
test = DataLoader(Test(x[50:]), batch_size=6)
models = [nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)) for _ in range(2)]
for k, model in enumerate(models):
    opt = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(2):
        for a, b in train:
            loss = nn.functional.cross_entropy(model(a), b)
            opt.zero_grad()
            loss.backward()
            opt.step()
    print("model", k, "last loss %.4f" % loss.item())
    torch.save(model.state_dict(), "fold%d.pt" % k)
rows = []
with torch.no_grad():
    for a, names in test:
        prob = torch.stack([m(a).softmax(1) for m in models]).mean(0)
        conf, label = prob.max(1)
        for name, c, l in zip(names, conf.tolist(), label.tolist()):
            rows.append((name, l, round(c, 4)))
with open("submission.csv", "w", newline="") as f:
    w = csv.writer(f)
    w.writerow(["id", "label", "conf"])
    w.writerows(rows)
print(len(rows), rows[0], rows[-1])
