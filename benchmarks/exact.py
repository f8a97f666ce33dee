"""What equal bits cost: a step with `exact=True` beside the default, in time and in bytes sent.

Both replicas live in the same processes and take turns, a block of steps each. `compute` is a network whose
exchange is small beside its arithmetic, `exchange` one whose exchange is large. Bytes are read from the loopback
device of a network namespace of the run's own (root on Linux); a ring all-reduce sends 2(n-1)/n of the gradient
for each rank.
"""

import argparse
import os
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from report import Rows, keep, on_ranks, spread, tell
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

BATCH, MICROBATCH, STEPS = 64, 8, 6


def networks() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    return {
        "compute": (
            nn.Sequential(
                nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(),
                nn.AvgPool2d(4), nn.Flatten(), nn.Linear(64 * 64, 10),
            ),
            (3, 32, 32),
        ),
        "exchange": (
            nn.Sequential(nn.Linear(256, 1024), nn.Tanh(), nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 10)),
            (256,),
        ),
    }  # fmt: skip


def sent_bytes() -> int:
    """What has gone over the loopback device, in all."""
    line = next(
        line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:")
    )
    return int(line.split()[9])


def block(model: nn.Module, train: Any, optimizer: Any) -> tuple[float, float]:
    """Seconds and bytes for a step, over one pass."""
    torch.distributed.barrier()
    bytes_before, begun, taken = sent_bytes(), time.perf_counter(), 0
    for step in train:
        for inputs, targets in step:
            F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        taken += 1
    torch.distributed.barrier()
    return (time.perf_counter() - begun) / taken, (sent_bytes() - bytes_before) / taken


def measure(rounds: int) -> Rows:
    import samestep

    world = samestep.init()
    rows = []
    for name, (_, shape) in networks().items():
        generator = torch.Generator().manual_seed(0)
        dataset = TensorDataset(
            torch.randn(BATCH * STEPS, *shape, generator=generator),
            torch.randint(0, 10, (BATCH * STEPS,), generator=generator),
        )
        made = {}
        for kind in ("default", "exact"):
            torch.manual_seed(0)
            model = samestep.replicate(networks()[name][0], exact=kind == "exact")
            train = samestep.steps(dataset, BATCH, microbatch=MICROBATCH, shuffle=True)
            made[kind] = model, train, torch.optim.SGD(model.parameters(), lr=0.01)
        seen: dict[str, list[tuple[float, float]]] = {kind: [] for kind in made}
        for number in range(rounds + 1):
            for kind in sorted(made, reverse=bool(number % 2)):
                turn = block(*made[kind])
                if number:
                    seen[kind].append(turn)
        gradient = sum(parameter.numel() * 4 for parameter in made["exact"][0].parameters())
        ring = 2 * (world.size - 1) * gradient
        rows.append(
            {
                "network": name, "ranks": world.size, "gradient_bytes": gradient,
                "default_ms": round(statistics.median(turn[0] for turn in seen["default"]) * 1e3, 2),
                "exact_ms": round(statistics.median(turn[0] for turn in seen["exact"]) * 1e3, 2),
                **spread(a[0] / b[0] for a, b in zip(seen["exact"], seen["default"], strict=True)),
                "default_bytes_of_ring": round(statistics.median(turn[1] for turn in seen["default"]) / ring, 3),
                "exact_bytes_of_ring": round(statistics.median(turn[1] for turn in seen["exact"]) / ring, 3),
            }
        )  # fmt: skip
    return rows


def a_loopback_of_its_own() -> list[str]:
    if os.geteuid() or not shutil.which("unshare") or not shutil.which("ip"):
        return []
    return ["unshare", "--net", "sh", "-c", 'ip link set lo up; exec "$@"', "sh"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        tell(measure(asked.rounds))
        return
    own = a_loopback_of_its_own()
    rows = [
        row
        for size in (2, 3, 4)
        for row in on_ranks(size, "--rounds", asked.rounds, around=own, SAMESTEP_EXACT_THREADS="1")
    ]
    keep(asked.rounds, rows)
    print(
        "ranks network   gradient    default      exact   ratio  middle half   bytes of a ring's: default, exact"
    )
    for row in rows:
        print(
            f"{row['ranks']:>5} {row['network']:8} {row['gradient_bytes'] / 1e6:6.1f} MB {row['default_ms']:7.1f} ms "
            f"{row['exact_ms']:7.1f} ms  {row['ratio']:6.3f}  {row['low']:5.3f}-{row['high']:5.3f}   "
            f"{row['default_bytes_of_ring']:.3f}, {row['exact_bytes_of_ring']:.3f}"
        )


if __name__ == "__main__":
    main()
