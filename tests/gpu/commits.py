"""A commit has the weights of its step, though the script's stream is late and the next step changes them at once."""

import os
import tempfile
from pathlib import Path

import torch
from torch import nn

import samestep
from samestep.train.checkpoint import capture
from samestep.train.nested import map_tensors

world = samestep.init(backend=os.environ.get("SAMESTEP_TEST_BACKEND"))
on_gpu = world.device.type == "cuda"
model = samestep.replicate(nn.Linear(1000, 1000 if on_gpu else 100).to(world.device))
with tempfile.TemporaryDirectory() as home:
    home = samestep.gather([home])[0]
    run = samestep.Checkpoint(home, keep=2, model=model)
    for number in range(4):
        for wait in (False, True):  # the copies of the second go to memory that was pinned after the first
            with torch.no_grad():
                if on_gpu:
                    torch.cuda._sleep(200_000_000)
                for parameter in model.parameters():
                    parameter.fill_(10 * number + wait + 1)
                run.step()
                run.commit(wait=wait)
                for parameter in model.parameters():
                    parameter.fill_(-1)
        if world.rank == 0:
            for place, path in enumerate(sorted(Path(home).glob("*.samestep"))[-2:]):
                found = []
                map_tensors(lambda tensor, found=found: found.append(tensor) or tensor, capture.read(path)[0])
                weights = [tensor for tensor in found if tensor.shape == model.weight.shape]
                assert weights, path
                assert all((weight == 10 * number + place + 1).all() for weight in weights), (
                    path,
                    weights[0][0, 0],
                )
    if world.rank == 0:
        print("every commit has the weights of its step")
    samestep.gather([0])
