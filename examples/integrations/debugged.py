"""Lets a debugger attach to one rank: `DEBUG_RANK=1 samestep run -n 2 debugged.py`, then attach to port 5678."""

import os

import debugpy
import torch

import samestep

world = samestep.init()
if os.environ.get("DEBUG_RANK") == str(world.rank):
    debugpy.listen(("127.0.0.1", int(os.environ.get("DEBUG_PORT", "5678"))))
    debugpy.wait_for_client()  # the other ranks wait in their next collective call, 10 minutes at most

model = samestep.replicate(torch.nn.Linear(8, 3).to(world.device))
model(torch.randn(4, 8, device=world.device)).sum().backward()
print(f"gradient {samestep.sum(1)} ranks")
