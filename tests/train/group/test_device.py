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
from samestep.train.group.device import HostMemory, moved, on_host, overlaps, synchronize, widest
from samestep.train.model.replicate import is_elsewhere

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

registration._setup_privateuseone_for_python_backend("private", backend_module=Two())
"""


@pytest.fixture
def alone(nest, tmp_path):
    """Runs a script on a process that belongs to no world: what it printed."""

    def run(source, **env):
        script = tmp_path / "alone.py"
        script.write_text(source)
        (process,) = nest.start(script, 0, env=env, apart=True)
        assert nest.wait([process]) == [0], process.complained
        return process

    return run


def test_a_kind_of_device_that_nobody_named_here_is_taken(alone):
    done = alone(
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
    assert done.said == "private:0 private:0\n['numpy', 'private', 'python', 'torch']\n"


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
def test_devices_that_torch_cannot_use_are_said_and_the_run_goes_on(alone):
    done = alone("import samestep; print(samestep.init().device)", ZE_AFFINITY_MASK="0")
    assert done.said == "cpu\n"
    assert re.fullmatch(
        r"samestep: 1 device is visible, and torch \S+ cannot train on it \(.*xpu.*\); install a torch for "
        r"this driver; this run trains on the cores\n",
        done.complained,
        re.IGNORECASE,
    ), done.complained


@pytest.mark.slow
@pytest.mark.skipif(torch.accelerator.is_available(), reason="torch can use the devices of this machine")
def test_a_process_that_was_started_for_a_device_does_not_train_on_the_cores_instead(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import samestep; samestep.init(); print('trained')")
    launch = [sys.executable, "-m", "samestep", "run", "--fork", "--run-dir", str(tmp_path / "runs")]
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


@pytest.mark.slow
@pytest.mark.parametrize("launched", [True, False])
def test_cublas_is_told_to_compute_the_same_bits_before_a_worker_starts_and_by_init(tmp_path, launched):
    script = tmp_path / "train.py"
    begin = "" if launched else "import samestep; samestep.init(); "
    script.write_text(f"{begin}import os; print(os.environ['CUBLAS_WORKSPACE_CONFIG'])")
    launch = ["-m", "samestep", "run", "-n", "1", "--run-dir", str(tmp_path / "runs")] if launched else []
    clean = {name: value for name, value in os.environ.items() if name != "CUBLAS_WORKSPACE_CONFIG"}
    for asked, expected in (({}, ":4096:8"), ({"CUBLAS_WORKSPACE_CONFIG": ":16:8"}, ":16:8")):
        done = subprocess.run(
            [sys.executable, *launch, script],
            env=clean | asked,
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
        )
        assert done.stdout == f"{expected}\n", done.stderr


@pytest.mark.parametrize(
    ("found", "own", "by_nccl", "expected"),
    [
        (["cuda:0"], "cuda:1", True, True),  # model.cuda() before init()
        (["cuda:0"], "cuda:1", False, True),
        (["cuda:1"], "cuda:1", True, False),
        (["cuda:0", "cuda:1"], "cuda:1", True, False),  # a model on two devices of its own
        (["cuda:1", "cpu"], "cuda:1", True, True),
        (["cuda:1", "cpu"], "cuda:1", False, False),
        (["cpu"], "cuda:1", True, True),
        (["cpu"], "cuda:1", False, False),
        (["cpu"], "cpu", False, False),
        ([], "cuda:0", True, False),
    ],
)
def test_a_model_on_another_ranks_device_is_told_by_the_number_of_the_device(found, own, by_nccl, expected):
    assert (
        is_elsewhere({torch.device(name) for name in found}, torch.device(own), by_nccl=by_nccl) is expected
    )


def test_nothing_is_copied_or_waited_for_on_a_cpu():
    cpu, x = torch.device("cpu"), torch.arange(6.0)
    assert not overlaps(cpu)
    # on MPS a copy that does not wait may read memory that was given away
    assert not overlaps(torch.device("mps"))
    assert moved(x, cpu) is x
    assert [widest(torch.device(kind)) for kind in ("cpu", "cuda", "xpu", "mps")] == 3 * [torch.float64] + [
        torch.float32
    ]
    assert [tensor.data_ptr() for tensor in on_host([x, x[1:]])] == [x.data_ptr(), x[1:].data_ptr()]
    synchronize(cpu)
    memory = HostMemory(33, cpu)
    memory.pin()
    assert len(memory.bytes) == 33


# What Python 3.14 has as its default, on the Python that is here.
AS_3_14 = """
import multiprocessing, sys
from multiprocessing import context
default = context.DefaultContext(context._concrete_contexts["forkserver"])
for module in (multiprocessing, context):
    module._default_context = default
for name in ("get_start_method", "set_start_method", "get_context"):
    setattr(multiprocessing, name, getattr(default, name))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="forks on Linux alone")
def test_a_loader_has_workers_where_python_does_not_fork_by_default():
    source = """
import dataclasses, torch, samestep

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return torch.tensor(index), torch.utils.data.get_worker_info() is not None

from samestep.train.data.source import source_of
WORLD = dataclasses.replace(samestep.init(), cores=3)
made = source_of(Rows(), {"num_workers": "auto"}, WORLD)
print(made._loader.num_workers, made._loader.multiprocessing_context)
plan = iter([(torch.tensor([0, 1]), None), (torch.tensor([2, 3]), None)])
print([batch[1].tolist() for batch, _ in made.batches(plan, 0, 0)])
multiprocessing.set_start_method("forkserver")  # by the script's own choice
print(source_of(Rows(), {"num_workers": "auto"}, WORLD)._loader.num_workers)
"""
    done = subprocess.run(
        [sys.executable, "-c", AS_3_14 + source], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("2 <multiprocessing.context.ForkContext")
    assert lines[1:] == ["[[True, True], [True, True]]", "0"]
