"""Trains with pauses instead of compute, so that busy cores change little; one part of the step is made slow.

As a program under a launcher it trains: `planted.py slow-PART`. `python tests/measure/planted.py --times 20` plants
each limit so often, a slow link between two network namespaces included, and counts how often it is named.
"""

import sys
import tempfile
import time
from pathlib import Path

PARTS = ("loader", "rank", "optimizer", "checkpoint", "link", "nothing")
NAMED = {"loader": "data", "rank": "slowest", "link": "exchange", "nothing": None}
SIZE = {"link": 1_500_000}  # parameters: 6 MB of gradients


def train(slow: str) -> None:
    import torch

    import samestep

    world = samestep.init()
    pause = 0.08 if slow == "nothing" else 0.02  # busy cores make every exchange some milliseconds longer

    class Samples(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 4000

        def __getitem__(self, at: int) -> torch.Tensor:
            if slow == "loader":
                time.sleep(0.01)
            return torch.ones(8)

    class Paused(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            time.sleep(0.06 if slow == "rank" and world.rank == 1 else pause)
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            time.sleep(pause)
            return gradient

    class Adam(torch.optim.SGD):
        def step(self, closure=None):
            time.sleep(0.04 if slow == "optimizer" else 0)
            return super().step(closure)

    torch.manual_seed(0)
    wide = SIZE.get(slow, 800) // 8
    model = samestep.replicate(torch.nn.Sequential(torch.nn.Linear(8, wide), torch.nn.Linear(wide, 1)))
    loader = samestep.loader(Samples(), 8, num_workers=0)
    optimizer = Adam(model.parameters(), lr=1e-5)
    parts = {"model": model, "loader": loader}
    if slow == "checkpoint":
        parts["more"] = Large()
    checkpoint = samestep.Checkpoint(
        tempfile.mkdtemp() if world.size == 1 else shared(), every=2, keep=2, **parts
    )
    for x in loader:
        loss = Paused.apply(model(x)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if slow == "checkpoint":
            checkpoint.step()


class Large:
    """A part of a checkpoint that takes long to copy."""

    def state_dict(self) -> dict[str, int]:
        time.sleep(0.2)
        return {"at": 0}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


def shared() -> str:
    import os

    return str(Path(os.environ["SAMESTEP_RUN"], "checkpoint"))


if __name__ == "__main__":
    train(sys.argv[1])
