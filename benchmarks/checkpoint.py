"""What a commit costs the training loop: its stall beside torch.save and DCP's async save, and `run.step()` alone.

The three take turns on one 500 MB state in one process, each on a quiet disk; a ratio is formed within each round,
and the median of the rounds is given with the middle half of them. The stall is the time until the call returns on
the slowest rank. `whole` is the time until the state is written in the background; samestep alone computes digests
and waits for the disk in it. `run.step()` is measured while no commit is due. `share` is the part of a step that is
spent inside of it, with the wait for the other rank; the ratio is that of the loop with it to the loop without it.
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from report import Rows, keep, on_ranks, spread, tell
from torch import nn
from torch.nn import functional as F

TENSORS = 20
STEPS = 500
Save = Callable[[], Callable[[], object]]


def state_of(megabytes: int) -> nn.Module:
    model = nn.Module()
    for number in range(TENSORS):
        weight = torch.randn(megabytes * 250_000 // TENSORS)
        model.register_parameter(f"weight{number}", nn.Parameter(weight))
    return model


def savers(model: nn.Module, home: Path, rank: int) -> dict[str, Save]:
    """For each system a call that saves, and returns a call that waits until the state is written."""
    import torch.distributed.checkpoint as dcp

    import samestep

    run = samestep.Checkpoint(home / "samestep", every=10**9, model=model)

    def ours() -> Callable[[], object]:
        run.commit()
        return run._writer.wait

    def plain() -> Callable[[], object]:
        if rank == 0:
            torch.save({"model": model.state_dict()}, home / "plain.pt")
        return lambda: None

    def asynchronous() -> Callable[[], object]:
        shutil.rmtree(home / f"dcp-{rank}", ignore_errors=True)
        future: Any = dcp.async_save({"model": model.state_dict()}, checkpoint_id=home / "dcp")
        return future.result

    return {"samestep": ours, "torch.save": plain, "dcp.async_save": asynchronous}


def stalls(size: int, megabytes: int, rounds: int, home: Path) -> Rows:
    import samestep

    world = samestep.init()
    model = samestep.replicate(state_of(megabytes)) if size > 1 else state_of(megabytes)
    made = savers(model, home, world.rank)
    times: dict[str, list[tuple[float, float]]] = {system: [] for system in made}
    order = list(made)
    for _ in range(rounds + 1):
        order = order[1:] + order[:1]
        for system in order:
            if world.rank == 0:
                os.sync()
            samestep.sum(0)
            begun = time.perf_counter()
            rest = made[system]()
            stalled = time.perf_counter() - begun
            rest()
            whole = time.perf_counter() - begun
            times[system].append((max(samestep.gather([stalled])), max(samestep.gather([whole]))))
    rows = []
    for system, measured in times.items():
        first, *later = [stall for stall, _ in measured]
        base = times["torch.save"][1:]
        rows.append(
            {
                "kind": "stall", "size": size, "megabytes": megabytes, "system": system, "base": "torch.save",
                "first_ms": round(first * 1e3, 1), "ms": round(statistics.median(later) * 1e3, 1),
                "whole_ms": round(statistics.median(whole for _, whole in measured[1:]) * 1e3, 1),
                **spread(mine[0] / theirs[0] for mine, theirs in zip(measured[1:], base, strict=True)),
            }
        )  # fmt: skip
    return rows


def step_share(size: int, rounds: int, home: Path) -> Rows:
    import samestep

    samestep.init()
    model = samestep.replicate(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs, targets = torch.randn(32, 64), torch.randint(0, 10, (32,))
    run = samestep.Checkpoint(home / "share", every=10**9, model=model, optimizer=optimizer)
    inside = 0.0

    def block(with_it: bool) -> float:
        """Seconds a step, over STEPS steps on every rank."""
        nonlocal inside
        begun = time.perf_counter()
        for _ in range(STEPS):
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            if with_it:
                before = time.perf_counter()
                run.step()
                inside += time.perf_counter() - before
        return (time.perf_counter() - begun) / STEPS

    block(True)
    inside, ratios, times = 0.0, [], []
    for number in range(3 * rounds):
        pair = {with_it: block(with_it) for with_it in ((True, False), (False, True))[number % 2]}
        ratios.append(pair[True] / pair[False])
        times.append(pair[True])
    call = inside / (3 * rounds * STEPS)
    return [
        {
            "kind": "step", "size": size, "system": "samestep", "base": "the loop without it",
            "call_us": round(call * 1e6, 2), "step_us": round(statistics.median(times) * 1e6, 1),
            "share": round(call / statistics.mean(times), 5), **spread(ratios),
        }
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--directory", help="a place on the disk that is meant  [the temporary one]")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        rows = step_share(asked.worker, asked.rounds, Path(asked.directory))
        tell(rows + stalls(asked.worker, asked.megabytes, asked.rounds, Path(asked.directory)))
        return
    rows = []
    for size in (1, 2):
        with tempfile.TemporaryDirectory(dir=asked.directory) as home:
            words = ("--rounds", asked.rounds, "--megabytes", asked.megabytes, "--directory", home)
            rows += on_ranks(size, *words, SAMESTEP_RUN_DIR=f"{home}/runs")
    keep(asked.rounds, rows)
    for row in rows:
        of = f"{row['ratio']:.3f} ({row['low']:.3f} to {row['high']:.3f}) of {row['base']}"
        if row["kind"] == "step":
            call = f"{row['call_us']} us in a step of {row['step_us']} us, {row['share']:.2%}"
            print(f"size {row['size']}: run.step() {call}; with it {of}")
        else:
            ms = f"{row['ms']:7.1f} ms (first {row['first_ms']:.0f}, whole {row['whole_ms']:.0f})"
            print(f"size {row['size']}: {row['system']:14} stalls {ms}: {of}")


if __name__ == "__main__":
    main()
