"""A training script that draws at random wherever it can, and notes each step it took outside of its checkpoints."""

import argparse
import os
import random
import signal
import time
from datetime import timedelta

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import samestep

SAMPLES = 46
BATCH = 12
PARTS = 2


class Noisy(Dataset):
    """Samples with noise of their own, whose numbers travel with them."""

    def __init__(self, length):
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(length, 8, generator=generator)
        self.targets = torch.randint(0, 3, (length,), generator=generator)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index] + 0.1 * torch.randn(8), self.targets[index], index


class Counter:
    """A user's own object with a state."""

    def __init__(self):
        self.drawn = 0.0

    def state_dict(self):
        return {"drawn": self.drawn}

    def load_state_dict(self, state):
        self.drawn = state["drawn"]


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("--notes", default=os.devnull)
    parser.add_argument("--attempt", type=int, default=0)
    parser.add_argument("--every", type=float, default=3, help="steps, or below 1 seconds")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds in each step")
    parser.add_argument("--bulk", type=int, default=0, help="further bytes of state")
    parser.add_argument("--accept", nargs="*", default=[])
    parser.add_argument("--loader", action="store_true", help="the default mode, not exact")
    parser.add_argument("--hear", help="NAME@N or NAME@N/RANK, sent by ranks to themselves in each Nth step")
    parser.add_argument("--stop-at", type=int, default=0, help="leave by commit and exit")
    return parser.parse_args()


def main():
    asked = arguments()
    world = samestep.init()
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))
    if asked.bulk:
        net.register_buffer("bulk", torch.randint(256, (asked.bulk,), dtype=torch.uint8))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=100_000)
    dataset = Noisy(asked.samples)
    options = {"shuffle": True, "num_workers": asked.workers, "seed": asked.seed}
    if asked.loader:
        model = samestep.replicate(net, sync_batchnorm=True)
        train = samestep.loader(dataset, asked.batch, **options)
    else:
        model = samestep.replicate(net, exact=True)
        train = samestep.steps(dataset, asked.batch, microbatch=PARTS, **options)
    counter = Counter()
    every = timedelta(seconds=asked.every) if asked.every < 1 else int(asked.every)
    run = samestep.Checkpoint(
        asked.directory,
        every=every,
        accept=asked.accept,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        counter=counter,
        train=train,
    )
    run.resume()
    log = os.open(
        f"{asked.notes}-{world.rank}" if asked.notes != os.devnull else os.devnull,
        os.O_WRONLY | os.O_CREAT | os.O_APPEND,
    )
    attempt = asked.attempt + int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    name, _, place = (asked.hear or "").partition("@")
    at, _, only = place.partition("/")
    for _ in train.epochs(asked.epochs):
        for step in train:
            taken = []
            for inputs, targets, numbers in [step] if asked.loader else step:
                F.cross_entropy(model(inputs), targets).backward()
                taken += numbers.tolist()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            counter.drawn += float(torch.rand(()))
            if asked.pause:
                time.sleep(asked.pause)
            line = f"{attempt} {run.steps + 1} {time.monotonic()} {' '.join(map(str, taken))}\n"
            os.write(log, line.encode())
            if name and (run.steps + 1) % int(at) == 0 and only in ("", str(world.rank)):
                os.kill(os.getpid(), signal.Signals[name])
            run.step()
            if run.steps == asked.stop_at:
                run.commit(wait=True)
                return


if __name__ == "__main__":
    main()
