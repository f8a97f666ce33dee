"""The comparison of replicas, at length: 200 planted bit flips, and 10,000 steps without one.

Run by hand: `python tests/agree_loop.py`; one line at the end.
"""

import gc
import os
import random
import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep

EVERY = 5


def steps(model: nn.Sequential, count: int, flip: tuple[int, int, int, int] | None = None) -> None:
    """Train for so many steps; (step, rank, tensor, bit) is flipped on the way."""
    world = samestep.init()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rows = TensorDataset(torch.randn(count * 4, 4), torch.arange(count * 4) % 2)
    for number, (x, y) in enumerate(samestep.loader(rows, 4)):
        if flip and flip[:2] == (number, world.rank):
            bits = list(model.parameters())[flip[2]].data.view(torch.int32).view(-1)
            bits[len(bits) // 2] ^= 1 << flip[3]
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def trials(flips: int, quiet: int) -> str:
    os.environ["SAMESTEP_CHECK_EVERY"] = str(EVERY)
    chance, found, named = random.Random(0), 0, 0
    for _ in range(flips):
        model = samestep.replicate(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
        # bits of the mantissa: one of the exponent may make the loss infinite, which ends a run by itself
        flip = (
            chance.randrange(EVERY),
            chance.randrange(samestep.init().size),
            chance.randrange(4),
            chance.randrange(23),
        )
        name = [name for name, _ in model.named_parameters()][flip[2]]
        try:
            steps(model, 2 * EVERY + 1, flip)
        except samestep.RanksDiffer as error:
            found += 1
            named += f": {name} of rank {flip[1]} is not" in str(error)
        del model
        gc.collect()
    steps(samestep.replicate(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))), quiet)
    said = f"flips {flips} | found within {EVERY} steps {found} | tensor and rank named {named}"
    return f"{said} | quiet steps {quiet}, false alarms 0"


if __name__ == "__main__":
    print(samestep.launch(trials, 3, *(int(number) for number in sys.argv[1:] or (200, 10_000)))[0])
