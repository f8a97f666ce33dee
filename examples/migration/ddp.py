"""Hand-written DDP; start it with `torchrun --nproc-per-node 2 ddp.py`."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from task import Net, test_set, train_set

cuda = torch.cuda.is_available()
local_rank = int(os.environ["LOCAL_RANK"])
if cuda:
    torch.cuda.set_device(local_rank)
dist.init_process_group("nccl" if cuda else "gloo")
rank, size = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
torch.manual_seed(0)
order = DistributedSampler(train_set)
train = DataLoader(train_set, batch_size=64 // size, sampler=order, drop_last=True)
test = DataLoader(test_set, batch_size=64, sampler=DistributedSampler(test_set, shuffle=False))
model = DistributedDataParallel(Net().to(device), device_ids=[local_rank] if cuda else None)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for epoch in range(3):
    order.set_epoch(epoch)
    model.train()
    for x, y in train:
        x, y = x.to(device), y.to(device)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    correct = torch.zeros((), device=device)
    with torch.no_grad():
        for x, y in test:
            x, y = x.to(device), y.to(device)
            correct += (model(x).argmax(1) == y).sum()
    dist.all_reduce(correct)
    if rank == 0:
        print(f"epoch {epoch}: {correct.item() / len(test_set):.2%}")

if rank == 0:
    torch.save(model.module.state_dict(), "model.pt")
dist.destroy_process_group()
