"""The time of a training step: samestep beside plain DDP, Accelerate and Fabric, and beside the serial script.

One process pair holds every variant and takes turns between them, a block of steps each, so that what disturbs
the machine disturbs all alike. A ratio is formed within each round; the median of the rounds is given with the
middle half of them, and with the interval that holds it in 95 of 100 such runs. The base is measured twice: the
difference between the two is noise, and a smaller one means nothing. `alone` are steps on one batch in memory, in
short blocks, `loop` the whole loop with each system's loader.
"""

import argparse
import contextlib
import io
import statistics
import subprocess
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from report import BIN, Rows, keep, on_ranks, spread, tell
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

MODELS = {
    "tiny": (lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)), 32, 200),
    "conv": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1),
            nn.BatchNorm2d(32), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(512, 10),
        ),
        64,
        40,
    ),
    "wide": (
        lambda: nn.Sequential(
            nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
        ),
        64,
        20,
    ),
}  # fmt: skip
ALONE = 5
Batches = Callable[[], Any]


def data(name: str, count: int) -> TensorDataset:
    shape = (1, 8, 8) if name == "conv" else (64,)
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(count, *shape, generator=generator), torch.randint(0, 10, (count,), generator=generator)
    )


def trainer(
    model: nn.Module, optimizer: Any, backward: Callable[[Any], None] | None = None
) -> Callable[[Any], None]:
    def step(batch: Any) -> None:
        inputs, targets = batch
        loss = F.cross_entropy(model(inputs), targets)
        backward(loss) if backward else loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def built(make: Callable[[], nn.Module]) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = make()
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def variants(name: str, size: int) -> dict[str, tuple[Callable[[Any], None], Batches]]:
    """For each system its step and its loader over the same data; all ranks share each batch."""
    import samestep

    make, batch, steps = MODELS[name]
    dataset = data(name, batch * steps)
    made: dict[str, tuple[Callable[[Any], None], Batches]] = {}

    world = samestep.init()
    model = samestep.replicate(make())
    ours = samestep.loader(dataset, batch, shuffle=True)
    made["samestep"] = trainer(model, torch.optim.SGD(model.parameters(), lr=0.01)), lambda: iter(ours)

    for base in ("serial", "serial again") if size == 1 else ("ddp", "ddp again"):
        model, optimizer = built(make)
        if size == 1:
            plain = DataLoader(dataset, batch, shuffle=True)
        else:
            sampler: Any = DistributedSampler(dataset, seed=0)
            plain = DataLoader(dataset, batch // size, sampler=sampler)
            model = nn.parallel.DistributedDataParallel(model)
        made[base] = trainer(model, optimizer), plain.__iter__
    if size == 1:
        return made

    from accelerate import Accelerator
    from lightning.fabric import Fabric

    model, optimizer = built(make)
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == size, "Accelerate trains silent copies"
    prepared, optimizer, loaded = accelerator.prepare(
        model, optimizer, DataLoader(dataset, batch // size, shuffle=True)
    )
    made["accelerate"] = trainer(prepared, optimizer, accelerator.backward), lambda: iter(loaded)

    model, optimizer = built(make)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        fabric = Fabric(accelerator="cpu", devices=size, strategy="ddp")
        fabric.launch()
    wrapped, optimizer = fabric.setup(model, optimizer)
    fetched = fabric.setup_dataloaders(DataLoader(dataset, batch // size, shuffle=True))
    made["fabric"] = trainer(wrapped, optimizer, fabric.backward), lambda: iter(fetched)
    assert world.size == size
    return made


def block(step: Callable[[Any], None], batches: Batches, alone: bool, count: int) -> float:
    """Seconds a step, over one block."""
    if alone:
        batch = next(batches())
        step(batch)
        begun = time.perf_counter()
        for _ in range(count):
            step(batch)
        return (time.perf_counter() - begun) / count
    begun, taken = time.perf_counter(), 0
    for batch in batches():
        step(batch)
        taken += 1
    return (time.perf_counter() - begun) / taken


def measure(size: int, rounds: int) -> Rows:
    rows = []
    for name, (_, batch, steps) in MODELS.items():
        made = variants(name, size)
        base = "serial" if size == 1 else "ddp"
        for kind in ("alone", "loop"):
            times: dict[str, list[float]] = {system: [] for system in made}
            order = list(made)
            count = ALONE if kind == "alone" else steps
            turns = rounds * steps // count
            for number in range(turns + 2):
                order = order[1:] + order[:1]
                for system in order:
                    if size > 1:
                        torch.distributed.barrier()
                    seconds = block(*made[system], kind == "alone", count)
                    if number > 1:
                        times[system].append(seconds)
            for system, seconds in times.items():
                rows.append(
                    {
                        "size": size, "model": name, "batch": batch, "kind": kind, "system": system, "base": base,
                        "microseconds": round(statistics.median(seconds) * 1e6, 1),
                        **spread(mine / theirs for mine, theirs in zip(seconds, times[base], strict=True)),
                    }
                )  # fmt: skip
    return rows


def start_up(rounds: int) -> Rows:
    """Seconds from the shell to the end of the first step of a two-process script, in turns."""
    script = str(Path(__file__).parent / "scripts" / "first_step.py")
    commands = {
        "torchrun": [str(BIN / "torchrun"), "--standalone", "--nproc-per-node=2", script, "ddp"],
        "samestep": [str(BIN / "samestep"), "run", "-n", "2", script, "samestep"],
    }
    times: dict[str, list[float]] = {system: [] for system in commands}
    for number in range(rounds + 1):
        for system, command in commands.items():
            begun = time.time()
            # not checked: a plain DDP script over Gloo sometimes aborts at its exit, long after the step
            done = subprocess.run(command, capture_output=True, text=True, timeout=120)
            reached = next(line for line in done.stdout.splitlines() if line.startswith("first step"))
            if number:
                times[system].append(float(reached.split()[-1]) - begun)
    return [
        {
            "kind": "start", "size": 2, "system": system, "base": "torchrun",
            "seconds": round(statistics.median(times[system]), 2),
            **spread(mine / theirs for mine, theirs in zip(times[system], times["torchrun"], strict=True)),
        }
        for system in commands
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        tell(measure(asked.worker, asked.rounds))
        return
    rows = [row for size in (1, 2) for row in on_ranks(size, "--rounds", asked.rounds)]
    rows += start_up(min(12, max(3, asked.rounds // 3)))
    keep(asked.rounds, rows)
    print("size model  kind   system             time   ratio   middle half         95 %")
    for row in rows:
        took = f"{row['microseconds']:9.0f}us" if "microseconds" in row else f"{row['seconds']:10.2f}s"
        print(
            f"{row['size']:>4} {row.get('model', '-'):6} {row['kind']:6} {row['system']:12} {took}  "
            f"{row['ratio']:5.3f}  {row['low']:5.3f}-{row['high']:5.3f}  "
            f"{row['from']:5.3f}-{row['to']:5.3f} of {row['base']}"
        )


if __name__ == "__main__":
    main()
