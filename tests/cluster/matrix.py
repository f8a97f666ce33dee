"""One small training, and every way in which it is started for real; each has to end in the same bits."""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from fournodes import Cluster

TRAIN = """
import hashlib
import torch
import samestep

def main():
    world = samestep.init()
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 2))
    data = torch.utils.data.TensorDataset(torch.randn(40, 8), torch.arange(40) % 2)
    train = samestep.steps(data, batch_size=16, microbatch=4, shuffle=True)
    model = samestep.replicate(net, exact=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in train.epochs(2):
        for step in train:
            for x, y in step:
                torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    places = samestep.gather(torch.tensor([[world.node, world.local_rank]])).tolist()
    if world.rank == 0:
        state = b"".join(tensor.detach().numpy().tobytes() for tensor in model.state_dict().values())
        where = " ".join(f"{node}.{local}" for node, local in places)
        print(f"\\nbits {hashlib.sha256(state).hexdigest()} {world.launcher} {where}", flush=True)

if __name__ == "__main__":
    main()
"""
PYTHON = sys.executable
_BIN = Path(PYTHON).parent
_SAMESTEP, _TORCHRUN = str(_BIN / "samestep"), str(_BIN / "torchrun")
_LIMIT_S = 55

# As the IDRIS guide has it: a task a device, cores for each, the module line left out.
_IDRIS = """#!/bin/bash
#SBATCH --job-name=idris
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --gres=gpu:2
#SBATCH --cpus-per-task=10
#SBATCH --hint=nomultithread
#SBATCH --time=00:05:00
#SBATCH --output=out
cd ${{SLURM_SUBMIT_DIR}}
set -x
srun {python} -u train.py
"""
# As the ENCCS course has them: the meeting point is made in the batch shell.
_ENCCS_SRUN = """#!/bin/bash
#SBATCH --job-name=enccs-srun
#SBATCH --time=00:05:00
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --gres=gpu:2
#SBATCH --cpus-per-task=18
#SBATCH --output=out
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((10000 + SLURM_JOB_ID % 10000))
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
srun {python} train.py
"""
_ENCCS_TORCHRUN = """#!/bin/bash
#SBATCH --job-name=enccs-torchrun
#SBATCH --time=00:05:00
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:2
#SBATCH --cpus-per-task=18
#SBATCH --output=out
head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export OMP_NUM_THREADS=1
srun {torchrun} --nnodes=$SLURM_NNODES --nproc-per-node=2 --rdzv-id=$RANDOM --rdzv-backend=c10d \\
    --rdzv-endpoint=$head_node:29500 train.py
"""


class End(NamedTuple):
    """What rank 0 of a run printed at its end."""

    bits: str
    launcher: str
    places: str


class Way(NamedTuple):
    """How a training is started, and where its ranks ought to find themselves (node.local rank)."""

    launcher: str
    places: str
    start: Callable[[Cluster, Path], str]


def read_end(output: str) -> End:
    """Fails with the whole output where there is not exactly one such line."""
    found = re.findall(r"^bits ([0-9a-f]{64}) (\w+) ([\d. ]+)\r?$", output, re.MULTILINE)
    assert len(found) == 1, output
    return End(*found[0])


def _run(words: Sequence[str], folder: Path, **variables: str) -> str:
    done = subprocess.run(
        words, cwd=folder, env={**os.environ, **variables}, capture_output=True, text=True, timeout=_LIMIT_S
    )
    assert done.returncode == 0, (
        f"{shlex.join(words)} ended with {done.returncode}\n{done.stdout}{done.stderr}"
    )
    return done.stdout


def _here(*words: str) -> Callable[[Cluster, Path], str]:
    return lambda cluster, folder: _run(words, folder)


def _from_login(*words: str) -> Callable[[Cluster, Path], str]:
    return lambda cluster, folder: _run(cluster.command(*words, cwd=folder), folder)


def _at_a_terminal(*words: str) -> Callable[[Cluster, Path], str]:
    def start(cluster: Cluster, folder: Path) -> str:
        words_there = shlex.join(cluster.command(*words, cwd=folder))
        return _run(["script", "--quiet", "--return", "--command", words_there, "/dev/null"], folder)

    return start


def _on_nodes(*each: Sequence[str]) -> Callable[[Cluster, Path], str]:
    """By hand on several machines at once: the words for each of them."""

    def start(cluster: Cluster, folder: Path) -> str:
        commands = [
            cluster.command(*(word.format(folder=folder) for word in words), node=f"ssnode{k}", cwd=folder)
            for k, words in enumerate(each, 1)
        ]
        started = [
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            for command in commands
        ]
        try:
            outputs = [process.communicate(timeout=_LIMIT_S)[0] for process in started]
        finally:
            for process in started:
                process.kill()
        assert not any(process.returncode for process in started), "\n".join(outputs)
        return "\n".join(outputs)

    return start


def _batch(script: str) -> Callable[[Cluster, Path], str]:
    def start(cluster: Cluster, folder: Path) -> str:
        (folder / "job.sh").write_text(script.format(python=PYTHON, torchrun=_TORCHRUN))
        job = cluster.submit("job.sh", cwd=folder)
        return _output(cluster, job, lambda: (folder / "out").read_text())

    return start


def _submitted(*words: str) -> Callable[[Cluster, Path], str]:
    def start(cluster: Cluster, folder: Path) -> str:
        said = cluster.run(_SAMESTEP, "submit", *words, "train.py", cwd=folder)
        job = said.split("job ", 1)[1].split(";")[0]
        jobs = [f"{job}_{k}" for k in range(2)] if "--array-ranks" in words else [job]
        for name in jobs:
            output = _output(
                cluster, name, lambda: "".join(path.read_text() for path in (folder / "runs").glob("*.out"))
            )
        return output

    return start


def _output(cluster: Cluster, job: str, read: Callable[[], str]) -> str:
    try:
        cluster.wait_state(job, "COMPLETED", timeout=_LIMIT_S)
    except RuntimeError as error:
        raise AssertionError(f"{error}\n{read()}") from None
    return read()


def _mpi(flavour: str, size: int, *allocation: str) -> Callable[[Cluster, Path], str]:
    def start(cluster: Cluster, folder: Path) -> str:
        words = [*allocation, f"mpirun.{flavour}", "-n", str(size), PYTHON, "train.py"]
        # Open MPI keeps sockets there, whose names must be short.
        with tempfile.TemporaryDirectory() as own:
            allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
            oversubscribed = {"OMPI_MCA_rmaps_base_oversubscribe": "1"}
            command = cluster.command(*words, cwd=folder) if allocation else words
            return _run(command, folder, TMPDIR=own, **allowed, **oversubscribed)

    return start


def _by_hand(number: int, size: int, at: str) -> Sequence[str]:
    return [
        _SAMESTEP,
        "run",
        "-n",
        str(size),
        "--nodes=2",
        f"--node-rank={number}",
        f"--rendezvous={at}",
        "train.py",
    ]


_ELASTIC = ("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=ssnode1:29400", "--rdzv-id=7")
_TWO, _UNEVEN, _SQUARE = "0.0 0.1", "0.0 0.1 1.0", "0.0 0.1 1.0 1.1"
_LAUNCH = "import samestep, train; samestep.launch(train.main, 2)"

WAYS = {
    "python": Way("alone", "0.0", _here(PYTHON, "train.py")),
    "samestep run": Way("samestep", _TWO, _here(_SAMESTEP, "run", "-n", "2", "train.py")),
    "samestep.launch": Way("samestep", _TWO, _here(PYTHON, "-c", _LAUNCH)),
    "torchrun": Way("torchrun", _TWO, _here(_TORCHRUN, "--nproc-per-node=2", "train.py")),
    "torchrun, 2 nodes": Way(
        "torchrun", "0.0 1.0", _on_nodes(*[(_TORCHRUN, *_ELASTIC, "--nproc-per-node=1", "train.py")] * 2)
    ),
    "srun, 1 node": Way("slurm", _TWO, _from_login("srun", "--ntasks=2", "--nodes=1", PYTHON, "train.py")),
    "srun, 2 nodes": Way("slurm", "0.0 1.0", _from_login("srun", "--nodes=2", PYTHON, "train.py")),
    "srun, 2 nodes, uneven": Way(
        "slurm", _UNEVEN, _from_login("srun", "--nodes=2", "--ntasks=3", PYTHON, "train.py")
    ),
    "srun, 2 nodes, cyclic": Way(
        "slurm", "0.0 1.0 0.1", _from_login("srun", "--nodes=2", "--ntasks=3", "-mcyclic", PYTHON, "train.py")
    ),
    "srun, 4 nodes": Way("slurm", "0.0 1.0 2.0 3.0", _from_login("srun", "--nodes=4", PYTHON, "train.py")),
    "srun --pty": Way(
        "slurm", _TWO, _at_a_terminal("srun", "--pty", "--ntasks=2", "--nodes=1", PYTHON, "train.py")
    ),
    "srun --pty, samestep run": Way(
        "samestep",
        _TWO,
        _at_a_terminal("srun", "--pty", "--ntasks=1", _SAMESTEP, "run", "-n", "2", "train.py"),
    ),
    "srun torchrun": Way(
        "torchrun",
        "0.0 1.0",
        _from_login(
            *("srun", "--nodes=2", "--nodelist=ssnode[1-2]", _TORCHRUN, *_ELASTIC),
            *("--nproc-per-node=1", "train.py"),
        ),
    ),
    "srun samestep run": Way(
        "samestep", _UNEVEN, _from_login("srun", "--nodes=2", _SAMESTEP, "run", "-n", "2,1", "train.py")
    ),
    "salloc, samestep run": Way(
        "samestep", _UNEVEN, _from_login("salloc", "--nodes=2", "--ntasks=3", _SAMESTEP, "run", "train.py")
    ),
    "samestep submit": Way(
        "slurm", "0.0 1.0", _submitted("--profile=cpu-node", "--nodes=2", "--tasks-per-node=1")
    ),
    "samestep submit --array-ranks": Way(
        "samestep", "0.0 1.0", _submitted("--profile=cpu-node", "--array-ranks", "--tasks-per-node=2")
    ),
    "IDRIS script": Way("slurm", _SQUARE, _batch(_IDRIS)),
    "ENCCS script, srun": Way("slurm", _SQUARE, _batch(_ENCCS_SRUN)),
    "ENCCS script, torchrun": Way("torchrun", _SQUARE, _batch(_ENCCS_TORCHRUN)),
    "mpirun (Open MPI)": Way("openmpi", _TWO, _mpi("openmpi", 2)),
    "mpirun (Open MPI), 2 nodes": Way("openmpi", "0.0 1.0", _mpi("openmpi", 2, "salloc", "-N2", "-n2")),
    "mpirun (MPICH)": Way("mpich", _TWO, _mpi("mpich", 2)),
    "mpirun (MPICH), 2 nodes": Way("mpich", _UNEVEN, _mpi("mpich", 3, "salloc", "-N2", "-n3")),
    "by hand, tcp": Way(
        "samestep", _UNEVEN, _on_nodes(*(_by_hand(k, 2 - k, "tcp://ssnode1:29500") for k in range(2)))
    ),
    "by hand, file": Way(
        "samestep", _UNEVEN, _on_nodes(*(_by_hand(k, 2 - k, "file://{folder}/meet") for k in range(2)))
    ),
}
