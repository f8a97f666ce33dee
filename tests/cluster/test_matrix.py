"""Every way in, for real, to the same bits; the table is printed at the end. LONG=1 takes all of them."""

import os
import time
from pathlib import Path

import pytest
from fournodes import Cluster
from matrix import TRAIN, WAYS, read_end

# What they go through, others go through too; `make ways` takes them all.
_ALSO = {
    "python",
    "samestep.launch",
    "samestep submit",
    "by hand, file",
    "torchrun",
    "torchrun, 2 nodes",
    "srun torchrun",
    "srun samestep run",
    "samestep run",
    "by hand, tcp",
    "srun, 1 node",
    "srun, 2 nodes",
    "srun, 2 nodes, cyclic",
    "srun, 4 nodes",
    "srun --pty",
    "srun --pty, samestep run",
    "mpirun (Open MPI)",
    "mpirun (MPICH)",
    "mpirun (MPICH), 2 nodes",
    "IDRIS script",
    "ENCCS script, srun",
    "ENCCS script, torchrun",
}
assert WAYS.keys() > _ALSO

pytestmark = [pytest.mark.slurm, pytest.mark.mpi]


@pytest.fixture(scope="module")
def serial_bits(tmp_path_factory: pytest.TempPathFactory, _up: Cluster) -> str:
    folder = tmp_path_factory.mktemp("serial")
    (folder / "train.py").write_text(TRAIN)
    return read_end(WAYS["python"].start(_up, folder)).bits


@pytest.mark.slow
@pytest.mark.parametrize("way", [way for way in WAYS if os.environ.get("LONG") or way not in _ALSO])
def test_every_way_in_ends_in_the_same_bits(
    way: str, isolated: Cluster, serial_bits: str, tmp_path: Path, table: list[str]
) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    began = time.monotonic()
    end = read_end(WAYS[way].start(isolated, tmp_path))
    seconds = time.monotonic() - began
    size = len(end.places.split())
    same = "same bits" if end.bits == serial_bits else "OTHER BITS"
    table.append(f"{way:<28}  {size:>5}  {end.places:<15}  {end.launcher:<8}  {same}  {seconds:5.1f} s")
    assert end == (serial_bits, WAYS[way].launcher, WAYS[way].places)
