"""What the meter costs a training step: the events of a real step are replayed to it; their time, as a part of 10 ms.

The time is the thread's processor time, which other programs disturb little.
"""

import argparse
import statistics
import time

import torch
from report import Rows, keep, on_ranks, tell
from torch import nn
from torch.utils.data import TensorDataset

STEPS = 200
OF_S = 0.010


def measure(size: int, rounds: int) -> Rows:
    import samestep
    from samestep.train.group.world import joined
    from samestep.train.meter import Meter
    from samestep.train.passes import Pass, Share

    samestep.init()
    torch.manual_seed(0)
    model = samestep.replicate(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    train = samestep.loader(TensorDataset(torch.randn(4 * STEPS, 16)), 4, shuffle=True, seed=0)
    group = joined()
    meter = group.the(Meter)
    phases: list[str] = []
    group.hear_phases(lambda phase, call: phases.append(phase))
    for (x,) in train:
        phases.clear()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    share = Share(Pass(train, 0, training=True), 0, 0, 4 // size, 4)
    took = []
    for _ in range(rounds):
        began = time.thread_time()
        for _ in range(STEPS):
            meter.step_begins(share)
            for phase in phases:
                meter.phase_begins(phase, "")
            meter.step_ends(share)
        took.append((time.thread_time() - began) / STEPS)
    cost = statistics.median(took)
    return [
        {
            "size": size,
            "phases": len(phases),
            "meter_us": round(cost * 1e6, 1),
            "of_10_ms": round(cost / OF_S, 5),
        }
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        torch.set_num_threads(1)
        tell(measure(asked.worker, asked.rounds))
        return
    rows = [row for size in (1, 2) for row in on_ranks(size, "--rounds", asked.rounds)]
    keep(asked.rounds, rows)
    for row in rows:
        print(f"{row['size']} ranks: {row['meter_us']} us of a step, {row['of_10_ms']:.2%} of one of 10 ms")


if __name__ == "__main__":
    main()
