import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from work import BATCH, EPOCHS, Net, notes, test_set, train_set

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
sampler = DistributedSampler(train_set)
train = DataLoader(train_set, batch_size=BATCH // size, sampler=sampler)
test = DataLoader(test_set, batch_size=500 // size, sampler=DistributedSampler(test_set, shuffle=False))
model = DistributedDataParallel(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    model.train()
    for x, y in train:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        notes.step()
    model.eval()
    correct = torch.zeros(1)
    with torch.no_grad():
        for x, y in test:
            correct += (model(x).argmax(1) == y).sum()
    dist.all_reduce(correct)
    accuracy = correct.item() / len(test_set)
    if rank == 0:
        print(f"epoch {epoch}: {accuracy:.2%}")
if rank == 0:
    notes.end(accuracy, model.module)
dist.destroy_process_group()
