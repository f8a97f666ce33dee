"""DDP with idr_torch; start it with `srun python idr.py`."""

import idr_torch
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from task import Net, test_set, train_set

cuda = torch.cuda.is_available()
if cuda:
    torch.cuda.set_device(idr_torch.local_rank)
dist.init_process_group(
    "nccl" if cuda else "gloo", init_method="env://", rank=idr_torch.rank, world_size=idr_torch.size
)
device = torch.device("cuda", idr_torch.local_rank) if cuda else torch.device("cpu")
torch.manual_seed(0)
order = DistributedSampler(train_set, idr_torch.size, idr_torch.rank)
train = DataLoader(train_set, batch_size=64 // idr_torch.size, sampler=order, drop_last=True)
test_order = DistributedSampler(test_set, idr_torch.size, idr_torch.rank, shuffle=False)
test = DataLoader(test_set, batch_size=64, sampler=test_order)
model = DistributedDataParallel(Net().to(device), device_ids=[idr_torch.local_rank] if cuda else None)
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
    if idr_torch.is_master:
        print(f"epoch {epoch}: {correct.item() / len(test_set):.2%}")

if idr_torch.is_master:
    torch.save(model.module.state_dict(), "model.pt")
dist.destroy_process_group()
