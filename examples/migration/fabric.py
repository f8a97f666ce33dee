"""Training with Fabric; start it with `torchrun --nproc-per-node 2 fabric.py`."""

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, DistributedSampler

from task import Net, test_set, train_set

fabric = Fabric(accelerator="auto", devices=2, strategy="ddp")
fabric.launch()
torch.manual_seed(0)
size, rank = fabric.world_size, fabric.global_rank
order = DistributedSampler(train_set, size, rank)
train = DataLoader(train_set, batch_size=64 // size, sampler=order, drop_last=True)
test = DataLoader(test_set, batch_size=64, sampler=DistributedSampler(test_set, size, rank, shuffle=False))
train, test = fabric.setup_dataloaders(train, test)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = fabric.setup(model, optimizer)

for epoch in range(3):
    order.set_epoch(epoch)
    model.train()
    for x, y in train:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
    model.eval()
    correct = torch.zeros((), device=fabric.device)
    with torch.no_grad():
        for x, y in test:
            correct += (model(x).argmax(1) == y).sum()
    correct = fabric.all_reduce(correct, reduce_op="sum").item()
    fabric.print(f"epoch {epoch}: {correct / len(test_set):.2%}")

if fabric.is_global_zero:
    torch.save(model.module.state_dict(), "model.pt")
