"""Which device a process takes, on any kind of device that torch knows, and what is said where torch cannot use one."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import samestep.train

SOURCE = Path(samestep.train.__file__).parent
KINDS = re.compile(r"\b(cuda|xpu|mps|hip|rocm)\b", re.IGNORECASE)

# torch's Python back end for private devices stands in for a device with two of its kind
PRIVATE = """
import os, torch
from torch.utils import backend_registration as registration

class Two(registration._DummyBackendModule):
    def device_count(self):
        return 2
    def get_rng_state(self):
        return torch.zeros(16, dtype=torch.uint8)

class Guard(registration._DummyDeviceGuard):
    pass

registration._setup_privateuseone_for_python_backend("private", backend_module=Two(), device_guard=Guard())
"""


def started(source, **env):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SAMESTEP")}
    return subprocess.run(
        [sys.executable, "-c", source],
        env=clean | env,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def test_a_kind_of_device_that_nobody_named_here_is_taken():
    done = started(
        PRIVATE
        + """
import samestep
from samestep.train import streams
from samestep.train.group.device import SideStreams
from samestep.train.group.world import joined
print(samestep.init().device, joined().the(SideStreams).of_copies.device)
print(sorted(__import__("json").loads(streams.capture())))
"""
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "private:0 private:0\n['numpy', 'private', 'python', 'torch']\n"


def test_only_one_file_of_train_names_kinds_of_devices():
    named = []
    for path in sorted(SOURCE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        told = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            word = getattr(node, "attr", None) or getattr(node, "id", None) or getattr(node, "value", None)
            if isinstance(word, str) and KINDS.search(word) and id(node) not in told:
                named.append(f"{path.relative_to(SOURCE)}:{node.lineno}: {word}")
    assert {place.partition(":")[0] for place in named} == {"group/device.py"}, named


@pytest.mark.skipif(torch.accelerator.is_available(), reason="torch can use the devices of this machine")
def test_devices_that_torch_cannot_use_are_said_and_the_run_goes_on():
    done = started("import samestep; print(samestep.init().device)", ZE_AFFINITY_MASK="0")
    assert done.stdout == "cpu\n"
    assert re.fullmatch(
        r"samestep: 1 device is visible, and torch \S+ cannot train on it \(.*xpu.*\); install a torch for "
        r"this driver; this run trains on the cores\n",
        done.stderr,
        re.IGNORECASE,
    ), done.stderr
    assert started("import samestep; samestep.init()").stderr == ""


@pytest.mark.skipif(torch.accelerator.is_available(), reason="torch can use the devices of this machine")
def test_a_process_that_was_started_for_a_device_does_not_train_on_the_cores_instead(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import samestep; samestep.init(); print('trained')")
    launch = [sys.executable, "-m", "samestep", "run", "--run-dir", str(tmp_path / "runs")]
    env = {**os.environ, "ZE_AFFINITY_MASK": "0,1"}
    done = subprocess.run([*launch, script], env=env, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 1
    assert "trained" not in done.stdout
    assert "2 devices are visible, and torch" in done.stderr
    assert "or write -n 2 to train on the cores" in done.stderr
    done = subprocess.run(
        [*launch, "-n", "2", script], env=env, capture_output=True, text=True, timeout=50, check=False
    )
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr


def test_cublas_is_told_to_compute_the_same_bits_before_a_worker_starts(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import os; print(os.environ['CUBLAS_WORKSPACE_CONFIG'])")
    command = [
        sys.executable,
        "-m",
        "samestep",
        "run",
        "-n",
        "1",
        "--run-dir",
        str(tmp_path / "runs"),
        script,
    ]
    clean = {name: value for name, value in os.environ.items() if name != "CUBLAS_WORKSPACE_CONFIG"}
    for asked, expected in (({}, ":4096:8"), ({"CUBLAS_WORKSPACE_CONFIG": ":16:8"}, ":16:8")):
        done = subprocess.run(
            command, env=clean | asked, capture_output=True, text=True, timeout=50, check=False
        )
        assert done.stdout == f"{expected}\n", done.stderr
