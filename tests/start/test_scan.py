"""A script that would train copies of one model, or start ranks itself, is said before it is started."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from samestep.errors import UsageError
from samestep.start.memory import check_room
from samestep.start.scan import names_early_variable, remark_on

SERIAL = "import torch\nfrom torch.utils.data import DataLoader\nprint(1)\n"


def remark(tmp_path: Path, source: str, **others: str) -> str:
    for name, text in others.items():
        (tmp_path / f"{name}.py").write_text(text)
    script = tmp_path / "train.py"
    script.write_text(source)
    return remark_on(script, 2) or ""


@pytest.mark.parametrize(
    "source",
    [
        "import torch, samestep\n",
        "import torch\nimport torch.distributed as dist\n",
        "import torch\nfrom torch import distributed\n",
        "import torch\ntorch.distributed.init_process_group()\n",
        "import torch\nfrom accelerate import Accelerator\n",
        "import torch\nfrom torch.distributed.fsdp import fully_shard\n",
        "print('no torch at all')\n",
        "import torch\nthis is no python\n",
    ],
)
def test_a_script_that_joins_a_run_is_left_alone(tmp_path, source):
    assert remark(tmp_path, source) == ""


def test_a_serial_script_is_said_to_train_copies(tmp_path):
    said = remark(tmp_path, SERIAL)
    assert said.startswith(
        "train.py and what it imports name neither samestep nor torch.distributed, so these 2"
    )


def test_what_the_script_imports_from_beside_it_counts(tmp_path):
    assert (
        remark(tmp_path, "import torch, helper\n", helper="import parts\n", parts="import samestep\n") == ""
    )
    assert remark(tmp_path, "import torch, other\n", other="import json\n") != ""


@pytest.mark.parametrize(
    "source",
    [
        "import torch.multiprocessing as mp\nmp.spawn(main, nprocs=2)\n",
        "import torch\ntorch.multiprocessing.spawn(main)\n",
        "from torch import multiprocessing\nimport torch.distributed\nmultiprocessing.spawn(main)\n",
        "from torch.multiprocessing import spawn as begin\nimport torch\nbegin(main)\n",
    ],
)
def test_a_script_that_starts_ranks_itself_is_said_with_its_line(tmp_path, source):
    line = source.count("\n")
    assert remark(tmp_path, source).startswith(
        f"train.py:{line} starts ranks itself, and 2 copies of it would each"
    )


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import os\nos.environ['OMP_NUM_THREADS'] = '1'\nimport torch\n", True),
        ("import os\nos.environ.setdefault('TORCH_LOGS', '+dynamo')\nimport torch\n", True),
        ("import settings\nimport torch\n", True),
        ("import os, torch\nos.environ['CUDA_VISIBLE_DEVICES'] = '1'  # OMP_NUM_THREADS\n", False),
    ],
)
def test_a_script_that_names_what_torch_reads_when_it_is_imported_is_known(tmp_path, source, names):
    (tmp_path / "settings.py").write_text("import os\nos.environ.update({'MKL_NUM_THREADS': '1'})\n")
    script = tmp_path / "train.py"
    script.write_text(source)
    assert names_early_variable(script) is names


def test_samestep_run_says_it_before_the_copies_start(tmp_path):
    (tmp_path / "train.py").write_text("import os, sys\nif sys.argv[1:]:\n    import torch\nprint('ran')\n")
    command = [sys.executable, "-m", "samestep", "run", "-n", "2", "--run-dir", str(tmp_path), "train.py"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0
    assert "these 2 processes train 2 copies of one model" in ran.stderr
    alone = subprocess.run([*command[:5], "1", *command[6:]], cwd=tmp_path, capture_output=True, text=True)
    assert "copies" not in alone.stderr


def test_more_processes_with_torch_than_fit_into_memory_are_refused(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import sys\n")
    check_room(100_000_000, script)
    script.write_text("import torch\n")
    with pytest.raises(
        UsageError, match=r"more than 13421772.8 GB of memory, and this machine has .*; use at most"
    ):
        check_room(100_000_000, script)
    check_room(1, script)


def test_samestep_run_starts_nothing_where_the_processes_do_not_fit(tmp_path):
    (tmp_path / "train.py").write_text("import torch\n")
    command = [sys.executable, "-m", "samestep", "run", "-n", "9999", "train.py"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    is_large = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") > 9999 * (128 << 20)
    assert is_large or (ran.returncode == 2 and "9999 processes that import torch need" in ran.stderr)
