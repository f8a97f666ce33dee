"""The script of accelerated.py with samestep; start it with `samestep run accelerated_samestep.py`."""

import torch
import torch.nn.functional as F
from torch.utils.data import RandomSampler

import samestep
from task import Net, test_set, train_set

device = samestep.init().device
torch.manual_seed(0)
order = RandomSampler(train_set, generator=torch.Generator().manual_seed(0))
train = samestep.loader(train_set, batch_size=64, sampler=order, drop_last=True)
test = samestep.loader(test_set, batch_size=128)
model = samestep.replicate(Net().to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for epoch in range(3):
    model.train()
    for x, y in train:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    correct = 0
    with torch.no_grad():
        for x, y in test:
            correct += (model(x).argmax(1) == y).sum().item()
    print(f"epoch {epoch}: {samestep.sum(correct) / len(test_set):.2%}")

samestep.save("model.pt", model.state_dict())
