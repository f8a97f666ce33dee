"""One training step on two processes, by plain DDP or by samestep; says at what time it was done."""

import sys
import time

import torch
from torch import nn

model = nn.Linear(16, 4)
if sys.argv[1] == "ddp":
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = nn.parallel.DistributedDataParallel(model)
else:
    import samestep

    rank = samestep.init().rank
    model = samestep.replicate(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.randn(8, 16)).sum().backward()
optimizer.step()
if rank == 0:
    print("first step", time.time(), flush=True)
if sys.argv[1] == "ddp":
    dist.barrier()  # a rank that leaves early may abort, and end the run before rank 0 has told the time
    dist.destroy_process_group()
