"""By hand: a script that forgets everything, many times on three ranks under load; every exit code is 0.

python tests/leave_loop.py [--runs 200] [--ranks 3] [--load 2]
"""

import argparse
import collections
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from samestep.rendezvous.listen import hold_port

FORGETFUL = """
import torch, samestep
from torch.utils.data import TensorDataset
world = samestep.init()
model = samestep.replicate(torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.BatchNorm1d(64)))
for x, in samestep.loader(TensorDataset(torch.rand(24, 4)), 12):
    model(x).sum().backward()
torch.distributed.all_reduce(torch.ones(100_000), async_op=True)
"""


def burn() -> None:
    while True:
        pass


def once(script: Path, size: int) -> list[int]:
    """The exit codes of all ranks."""
    held, port = hold_port()
    with held:
        world = {
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        ranks = [
            subprocess.Popen(
                [sys.executable, str(script)],
                env=os.environ
                | {key: str(value) for key, value in (world | {"RANK": rank, "LOCAL_RANK": rank}).items()},
            )
            for rank in range(size)
        ]
        return [rank.wait(120) for rank in ranks]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("runs", 200), ("ranks", 3), ("load", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    load = [multiprocessing.Process(target=burn, daemon=True) for _ in range(options.load)]
    for process in load:
        process.start()
    began = time.monotonic()
    ends: collections.Counter[int] = collections.Counter()
    with tempfile.TemporaryDirectory() as home:
        script = Path(home, "train.py")
        script.write_text(FORGETFUL)
        for _ in range(options.runs):
            ends.update(once(script, options.ranks))
    bad = {code: count for code, count in ends.items() if code}
    seconds = time.monotonic() - began
    print(f"{options.runs} runs of {options.ranks} ranks in {seconds:.0f} s: non-zero exits {bad or 0}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
