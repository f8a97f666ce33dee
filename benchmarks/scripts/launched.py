"""As a course's script: plain DDP that takes rank and size from whatever started it, and says what it was given."""

import gc
import json
import os
import sys
import time
from itertools import pairwise
from statistics import median

import torch
import torch.distributed as dist
from torch import nn

NAMES = (
    ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"),
    ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"),
)
STEPS = 40

if __name__ == "__main__":
    rank, size = (next(int(os.environ[name]) for name in names if name in os.environ) for names in NAMES)
    store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), size, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*(nn.Linear(384, 384) for _ in range(6))))
    optimizer, x = torch.optim.SGD(model.parameters(), lr=1e-6), torch.randn(512, 384)
    ends = []
    for _ in range(STEPS):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        ends.append((time.time(), time.perf_counter()))
    times = [after[1] - before[1] for before, after in pairwise(ends[10:])]
    facts = {"first_step": ends[0][0], "step_s": median(times), "threads": torch.get_num_threads(),
             "cores": len(os.sched_getaffinity(0))}  # fmt: skip
    if rank == 0:
        print(json.dumps(facts), flush=True)
    del model, optimizer  # DDP's threads would abort the exit of some runs
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
