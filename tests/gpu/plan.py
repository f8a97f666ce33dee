"""What is to be tried where a GPU is: `make gpu` with one, `make gpus` with two or more; at most 30 minutes.

Without a GPU it runs as far as it goes, on the cores, so that a mistake in a script is found before the day it counts.
Each check is a script of this folder or a part of the tests; results and times go to benchmarks/results/gpu.json.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "gpu.json"
LIMIT_S = 1800
ON_GPU = torch.cuda.is_available()
GLOO = {"SAMESTEP_TEST_BACKEND": "gloo"}
REMEDY = """{device} is here, and torch {torch} cannot use it: it was built for CPU, or for a newer driver.
Install one for the driver, of the newest CUDA that nvidia-smi names; cu126 is that of CUDA 12.6:
    .venv/bin/python -m pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu126
or name a Python whose torch can use it: make gpu PYTHON=python3
To try the scripts on the cores all the same: make gpu CUDA_VISIBLE_DEVICES="""
PYTEST = [sys.executable, "-m", "pytest", "-q", "-n", "4", "-p", "no:benchmark", "tests/train/model"]
SANITIZED = {"TORCH_CUDA_SANITIZER": "1"} if ON_GPU else {}


class Check(NamedTuple):
    """Commands that must succeed, and where there are several, print the same."""

    name: str
    commands: Sequence[Sequence[str]]
    env: Mapping[str, str] = {}
    limit_s: int = 120


def on_ranks(size: int, script: str, *words: object) -> list[str]:
    if size == 1:
        return [sys.executable, str(HERE / script), *map(str, words)]
    launch = [sys.executable, "-m", "samestep", "run", "-n", str(size), "--tee", "0"]
    return [*launch, str(HERE / script), *map(str, words)]


def of_one() -> Iterator[Check]:
    """With one GPU: two ranks share it over Gloo."""
    yield Check("device choice", [on_ranks(1, "choice.py")])
    yield Check("device choice, two ranks", [on_ranks(2, "choice.py")], GLOO)
    for kind in ("float32", "bfloat16", "channels_last"):
        sizes = (1, 2, 3) if ON_GPU else (1, 2)
        yield Check(f"equal bits in {kind}", [on_ranks(size, "bits.py", kind) for size in sizes], GLOO, 240)
    yield Check("NCCL alone beside the serial tree", [on_ranks(1, "tree.py")])
    yield Check("loader under a delayed stream", [on_ranks(1, "races.py")])
    yield Check("streams under torch's sanitizer", [on_ranks(1, "races.py")], SANITIZED)
    yield Check("tree under torch's sanitizer", [on_ranks(1, "tree.py")], SANITIZED)
    yield Check("no wait in 100 default steps", [on_ranks(1, "waits.py")])
    yield Check("no wait in 100 default steps, two ranks", [on_ranks(2, "waits.py")], GLOO)
    yield Check("commits under a delayed stream", [on_ranks(1, "commits.py")])
    yield Check("parts of a step", [on_ranks(1, "parts.py")])
    yield Check("parts of a step, two ranks", [on_ranks(2, "parts.py")], GLOO)
    yield Check("a loss that is nan", [on_ranks(2, "lost.py")], GLOO)
    yield Check(
        "dropout inside kernels with same=True", [on_ranks(1, "whole.py")], {"SAMESTEP_BACKEND": "gloo"}, 300
    )
    yield Check("the serial script's numbers with same=True", [on_ranks(1, "scripts.py")], {}, 600)
    yield Check("beside plain torch", [on_ranks(1, "speed.py")], {}, 300)
    device = {"SAMESTEP_TEST_DEVICE": "cuda" if ON_GPU else "cpu", **GLOO}
    tests = [*PYTEST, "-k", "2-ranks"]
    yield Check("training tests, two ranks", [tests], device, 480)


def of_many(count: int) -> Iterator[Check]:
    """With several: a process on each, over NCCL."""
    yield Check("device choice", [on_ranks(count, "choice.py")])
    for kind in ("float32", "bfloat16", "channels_last"):
        sizes = sorted({1, 2, count})
        yield Check(f"equal bits in {kind}", [on_ranks(size, "bits.py", kind) for size in sizes], {}, 240)
    yield Check("NCCL beside the serial tree", [on_ranks(count, "tree.py")])
    yield Check("tree under torch's sanitizer", [on_ranks(count, "tree.py")], SANITIZED)
    yield Check("no wait in 100 default steps", [on_ranks(count, "waits.py")])
    yield Check("commits under a delayed stream", [on_ranks(count, "commits.py")])
    yield Check("parts of a step", [on_ranks(count, "parts.py")])
    yield Check("a loss that is nan", [on_ranks(count, "lost.py")])
    yield Check("beside DistributedDataParallel", [on_ranks(count, "speed.py")], {}, 300)
    device = {"SAMESTEP_TEST_DEVICE": "cuda" if ON_GPU else "cpu"}
    tests = [*PYTEST, "-k", f"{min(count, 3)}-ranks"]
    yield Check("training tests over NCCL", [tests], device, 480)


def run(check: Check, until: float = float("inf")) -> dict[str, Any]:
    begun, printed, failure = time.monotonic(), [], ""
    for command in check.commands:
        limit_s = min(check.limit_s, until - time.monotonic())
        if limit_s <= 0:
            failure = "not begun: the time is over"
            break
        try:
            with tempfile.TemporaryDirectory() as runs:
                # any Python with a torch for this GPU will do: it need not have samestep
                path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
                env = {**os.environ, "PYTHONPATH": path, "SAMESTEP_RUN_DIR": runs, **check.env}
                done = subprocess.run(
                    command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=limit_s, check=False
                )
        except subprocess.TimeoutExpired:
            failure = f"not done after {limit_s:.0f} s"
            break
        if done.returncode:
            failure = (done.stdout + done.stderr)[-2000:]
            break
        printed.append(done.stdout.strip())
    if not failure and len(set(printed)) > 1:
        failure = "the runs printed unlike lines: " + " | ".join(printed)
    seconds = round(time.monotonic() - begun, 1)
    return {"check": check.name, "seconds": seconds, "printed": printed[:1], "failure": failure}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--many", action="store_true", help="a process on each of several GPUs")
    parser.add_argument("--only", default="", help="checks with this in their name")
    parser.add_argument("--list", action="store_true")
    asked = parser.parse_args()
    unused = [] if ON_GPU else [*Path("/dev").glob("nvidia[0-9]*")]
    if unused and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
        print(REMEDY.format(device=unused[0], torch=torch.__version__), file=sys.stderr)
        return 2
    count = max(2, torch.cuda.device_count() if ON_GPU else 2)
    checks = [check for check in (of_many(count) if asked.many else of_one()) if asked.only in check.name]
    if not checks:
        parser.error(f"no check has {asked.only!r} in its name")
    if asked.list:
        print(*(check.name for check in checks), sep="\n")
        return 0
    print(
        f"on {torch.cuda.get_device_name() if ON_GPU else 'the cores: no GPU is here'}, torch {torch.__version__}"
    )
    rows, until = [], time.monotonic() + LIMIT_S
    for check in checks:
        rows.append(run(check, until))
        failure, seconds = rows[-1]["failure"], rows[-1]["seconds"]
        print(f"{'failed' if failure else 'passed':6} {seconds:7.1f} s  {check.name}", flush=True)
        for line in [*failure.splitlines(), *"".join(rows[-1]["printed"]).splitlines()]:
            print(f"    {line}")
    if ON_GPU and not asked.only:
        machine = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "devices": count}
        RESULTS.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
    return int(any(row["failure"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
