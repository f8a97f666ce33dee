"""Images/s of a data set that is tensors in memory: `samestep.loader` beside torch's DataLoader, one process.

Both go through the same uint8 images, shuffled, in batches; they take turns, an epoch each. DataLoader stands there
without workers and with one for each core. A ratio is formed within each round.
"""

import argparse
import os
import statistics
import time

import torch
from report import Rows, keep, spread
from torch.utils.data import DataLoader, TensorDataset

import samestep

IMAGES = {"mnist": (60_000, 28, 28), "cifar10": (50_000, 3, 32, 32)}
BATCH = 128


def measure(name: str, rounds: int) -> Rows:
    shape = IMAGES[name]
    images = torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    dataset = TensorDataset(images, torch.arange(shape[0]) % 10)
    workers = os.cpu_count()
    loaders = {
        "samestep": samestep.loader(dataset, BATCH, shuffle=True),
        "DataLoader": DataLoader(dataset, BATCH, shuffle=True),
        f"DataLoader, {workers} workers": DataLoader(
            dataset, BATCH, shuffle=True, num_workers=workers, persistent_workers=True
        ),
    }
    speeds: dict[str, list[float]] = {system: [] for system in loaders}
    for number in range(rounds + 1):
        for system, batches in loaders.items():
            begun = time.perf_counter()
            seen = sum(len(labels) for _, labels in batches)
            speed = seen / (time.perf_counter() - begun)
            assert seen == shape[0]
            if number:
                speeds[system].append(speed)
    return [
        {
            "images": name, "shape": list(shape[1:]), "batch": BATCH, "system": system, "base": "samestep",
            "images_per_s": round(statistics.median(speeds[system])),
            **spread(ours / theirs for ours, theirs in zip(speeds["samestep"], speeds[system], strict=True)),
        }
        for system in loaders
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    asked = parser.parse_args()
    samestep.init()
    rows = [row for name in IMAGES for row in measure(name, asked.rounds)]
    keep(asked.rounds, rows)
    print("images   through                    images/s   samestep is faster   middle half")
    for row in rows:
        print(
            f"{row['images']:8} {row['system']:23} {row['images_per_s']:11,}   {row['ratio']:10.2f} times     "
            f"{row['low']:5.2f}-{row['high']:5.2f}"
        )


if __name__ == "__main__":
    main()
