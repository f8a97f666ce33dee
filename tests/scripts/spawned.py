"""The script starts its ranks itself.

verdict: refused
cause: trains in processes that it starts itself (spawned.py
"""

import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn

import samestep


def work(rank):
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    F.mse_loss(model(torch.randn(4, 6)), torch.randn(4, 1)).backward()
    optimizer.step()


if __name__ == "__main__":
    samestep.init()
    mp.start_processes(work, nprocs=2, start_method="fork")
