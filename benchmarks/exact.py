"""What equal bits cost: a step with `exact=True` beside the default, in time and in bytes sent.

Both replicas live in the same processes and take turns, a block of steps each. `compute` is a network whose
exchange is small beside its arithmetic, `exchange` one whose exchange is large. Bytes are read from the loopback
device of a network namespace of the run's own (root on Linux); a ring all-reduce sends 2(n-1)/n of the gradient
for each rank.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

RESULTS = Path(__file__).parent / "results" / "exact.json"
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


def measure(rounds: int) -> list[dict[str, Any]]:
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
                one = block(*made[kind])
                if number:
                    seen[kind].append(one)
        gradient = sum(one.numel() * 4 for one in made["exact"][0].parameters())
        ratios = sorted(a[0] / b[0] for a, b in zip(seen["exact"], seen["default"], strict=True))
        ring = 2 * (world.size - 1) * gradient
        rows.append(
            {
                "network": name, "ranks": world.size, "gradient_bytes": gradient,
                "default_ms": round(statistics.median(one[0] for one in seen["default"]) * 1e3, 2),
                "exact_ms": round(statistics.median(one[0] for one in seen["exact"]) * 1e3, 2),
                "ratio": round(statistics.median(ratios), 3),
                "low": round(ratios[len(ratios) // 4], 3), "high": round(ratios[-1 - len(ratios) // 4], 3),
                "default_bytes_of_ring": round(statistics.median(one[1] for one in seen["default"]) / ring, 3),
                "exact_bytes_of_ring": round(statistics.median(one[1] for one in seen["exact"]) / ring, 3),
            }
        )  # fmt: skip
    return rows


def workers(size: int, rounds: int) -> list[dict[str, Any]]:
    command = [str(Path(sys.executable).parent / "samestep"), "run", "-n", str(size)]
    command += [__file__, "--worker", "--rounds", str(rounds)]
    if os.geteuid() == 0 and shutil.which("unshare") and shutil.which("ip"):
        command = ["unshare", "--net", "sh", "-c", 'ip link set lo up; exec "$@"', "sh", *command]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "SAMESTEP_EXACT_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1200)
    if done.returncode:
        sys.exit(f"{size} ranks failed:\n{done.stderr}")
    rows: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        rows = measure(asked.rounds)
        if os.environ["RANK"] == "0":
            print(json.dumps(rows))
        return
    rows = [row for size in (2, 3, 4) for row in workers(size, asked.rounds)]
    facts = {"torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count()}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"machine": facts, "rounds": asked.rounds, "rows": rows}, indent=1) + "\n")
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
