"""Trains with pauses instead of compute, so that busy cores change little; one part of the step is made slow.

As a program under a launcher it trains: `planted.py PART`. `python tests/measure/planted.py --times 20` plants each
limit so often, a slow link between two network namespaces included (root), and counts how often it is named.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

NAMED = {
    "loader": "data", "rank": "slowest rank", "optimizer": "optimizer", "checkpoint": "checkpoint",
    "link 1000": "exchange", "link 100": "exchange", "nothing": None,
}  # fmt: skip
NODES = ["left", "right"]
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
    return str(Path(os.environ["SAMESTEP_RUN"], "checkpoint"))


def limit(part: str, network: Any, home: Path) -> str | None:
    """What one run of the script is limited by, as the verdict says."""
    from samestep.measure.scale import Plan, Variant, measure, measured_of
    from samestep.measure.verdict import limit_of, rows_of

    two = Variant(2, 1)
    if part.startswith("link"):
        for node in NODES:
            network.limit(node, f"{part.split()[1]}mbit")
        found = [measured_of(part, on_nodes(network, home), two, 0, 0.0)]
    else:
        found, _ = measure(Plan([__file__, part], [two], 1, 20, False), lambda *_: None)
    row = rows_of(found, [two])[0]
    said = limit_of(row, row)
    return said.name if said else None


def on_nodes(network: Any, home: Path) -> Path:
    """The script on two machines of a limited network; the run's directory."""
    env = {**os.environ, "SAMESTEP_METER": "0", "SAMESTEP_MEASURE_STEPS": "20", "OMP_NUM_THREADS": "1"}
    where = [
        "--nodes",
        "2",
        "--rendezvous",
        f"tcp://{network.address[NODES[0]]}:29517",
        "--run-dir",
        str(home),
    ]
    run = [sys.executable, "-m", "samestep", "run", "-n", "1", *where]
    started = [
        subprocess.Popen([*network.enter(node), *run, "--node-rank", str(k), __file__, "link"], env=env)
        for k, node in enumerate(NODES)
    ]
    assert [process.wait(120) for process in started] == [0, 0]
    return max(home.iterdir(), key=lambda run: run.stat().st_mtime_ns)


def main() -> None:
    """Plant each limit several times."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--parts", default=",".join(NAMED))
    asked = parser.parse_args()
    sys.path.append(str(Path(__file__).parents[1] / "cluster"))
    from network import Network

    with tempfile.TemporaryDirectory() as folder:
        os.environ["SAMESTEP_RUN_DIR"] = folder
        network = Network(Path(folder, "hosts"), NODES) if "link" in asked.parts else None
        try:
            for part in asked.parts.split(","):
                home = Path(folder, part.replace(" ", "-"))
                found = [limit(part, network, home) for _ in range(asked.times)]
                right = sum(name == NAMED[part] for name in found)
                print(f"{part}: named in {right} of {asked.times} ({found})", flush=True)
        finally:
            if network is not None:
                network.close()


if __name__ == "__main__":
    if "SAMESTEP_RUN" in os.environ:
        train(sys.argv[1])
    else:
        main()
