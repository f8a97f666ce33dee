"""One process with DataParallel; start it with `python data_parallel.py`."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from task import Net, test_set, train_set

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
train = DataLoader(train_set, batch_size=64, shuffle=True)
test = DataLoader(test_set, batch_size=128)
model = nn.DataParallel(Net()).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for epoch in range(3):
    model.train()
    for x, y in train:
        x, y = x.to(device), y.to(device)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    correct = 0
    with torch.no_grad():
        for x, y in test:
            x, y = x.to(device), y.to(device)
            correct += (model(x).argmax(1) == y).sum().item()
    print(f"epoch {epoch}: {correct / len(test_set):.2%}")

torch.save(model.module.state_dict(), "model.pt")
