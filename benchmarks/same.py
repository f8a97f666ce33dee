"""What the serial script's numbers cost: a step with `same=True` beside the default, at 2 and 4 ranks.

Both replicas live in the same processes and take turns, a block of steps each; in the default's turns torch's random
operations are its own. The default is measured twice: the difference between the two is noise. `plain` has neither
draws nor BatchNorm, `transformer` has dropout 0.1 everywhere, in `time first` the batch is its second dimension, and
`batchnorm` is a CNN. `plain` takes ten times as many turns, since its ratio must be known to a hundredth.
"""

import argparse
import os
import random
import statistics
import time
from typing import Any

import torch
from report import Rows, keep, on_ranks, spread, tell
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

BATCH, STEPS = 32, 6
TURNS = {"plain": 10}  # for each round


class Encoder(nn.Module):
    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.1, batch_first=batch_first)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.batch_first = batch_first

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.batch_first:
            return self.layers(inputs)
        return self.layers(inputs.transpose(0, 1).contiguous()).transpose(0, 1)


def encoder(*, batch_first: bool) -> nn.Module:
    return nn.Sequential(
        Encoder(batch_first=batch_first), nn.Flatten(), nn.Dropout(0.1), nn.Linear(64 * 128, 10)
    )


def networks() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    return {
        "plain": (
            nn.Sequential(
                nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(),
                nn.AvgPool2d(4), nn.Flatten(), nn.Linear(64 * 64, 10),
            ),
            (3, 32, 32),
        ),
        "transformer": (encoder(batch_first=True), (64, 128)),
        "time first": (encoder(batch_first=False), (64, 128)),
        "batchnorm": (
            nn.Sequential(
                nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1),
                nn.BatchNorm2d(64), nn.ReLU(), nn.AvgPool2d(4), nn.Flatten(), nn.Linear(64 * 64, 10),
            ),
            (3, 32, 32),
        ),
    }  # fmt: skip


def block(model: nn.Module, train: Any, optimizer: Any) -> float:
    """Seconds a step, over one pass."""
    torch.distributed.barrier()
    begun = time.perf_counter()
    for inputs, targets in train:
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.distributed.barrier()
    return (time.perf_counter() - begun) / STEPS


def measure(rounds: int) -> Rows:
    import samestep
    from samestep.train.draws.draws import Draws
    from samestep.train.group.world import joined

    world = samestep.init()
    rows = []
    for name in networks():
        made = {}
        for kind in ("default", "again", "same"):
            torch.manual_seed(0)
            network, shape = networks()[name]
            generator = torch.Generator().manual_seed(0)
            inputs = torch.randn(BATCH * STEPS, *shape, generator=generator)
            targets = torch.randint(0, 10, (BATCH * STEPS,), generator=generator)
            model = samestep.replicate(network, same=kind == "same")
            train = samestep.loader(TensorDataset(inputs, targets), BATCH, shuffle=True, seed=0)
            made[kind] = model, train, torch.optim.SGD(model.parameters(), lr=0.01)
        draws = joined().the(Draws)
        seen: dict[str, list[float]] = {kind: [] for kind in made}
        order, orders = list(made), random.Random(0)  # equal on all ranks
        for number in range(rounds * TURNS.get(name, 1) + 1):
            orders.shuffle(order)
            for kind in order:
                draws.close()
                if kind == "same":
                    draws.begin()
                seconds = block(*made[kind])
                if number:
                    seen[kind].append(seconds)
        draws.close()
        for kind in ("again", "same"):
            rows.append(
                {
                    "network": name, "ranks": world.size, "system": kind,
                    "default_ms": round(statistics.median(seen["default"]) * 1e3, 2),
                    "ms": round(statistics.median(seen[kind]) * 1e3, 2),
                    **spread(a / b for a, b in zip(seen[kind], seen["default"], strict=True)),
                }
            )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        torch.set_num_threads(1)
        tell(measure(asked.rounds))
        return
    load = os.getloadavg()[0]
    rows = [row for size in (2, 4) for row in on_ranks(size, "--rounds", asked.rounds)]
    keep(asked.rounds, rows)
    print(f"load of the machine before: {load:.1f}")
    print("ranks network      system   default       time   ratio  middle half  95 of 100 runs")
    for row in rows:
        print(
            f"{row['ranks']:>5} {row['network']:12} {row['system']:7} {row['default_ms']:6.1f} ms {row['ms']:7.1f} ms "
            f"{row['ratio']:6.3f}  {row['low']:5.3f}-{row['high']:5.3f}  {row['from']:5.3f}-{row['to']:5.3f}"
        )


if __name__ == "__main__":
    main()
