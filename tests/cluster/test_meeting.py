"""Ranks of real Slurm steps that must find their own run, and nobody else's; they need no torch."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fournodes import NODES, Cluster

pytestmark = pytest.mark.slurm

_RANK = """
import os, sys, time
from samestep.errors import SamestepError
from samestep.placement.place import this_process
from samestep.rendezvous.ranks import connect_ranks
here = this_process()
if os.environ.get("LATE") == str(here.rank):
    time.sleep(float(os.environ["LIMIT"]) + 3)
    sys.exit()
try:
    peers = connect_ranks(here, float(os.environ.get("LIMIT", "50")))
    runs = peers.gather(here.run, 20)
except SamestepError as error:
    sys.exit(f"rank {here.rank}: {error}")
print(f"rank {here.rank} of {here.run} met {sorted(set(runs))}", flush=True)
"""
_PAIRS = int(os.environ.get("PAIRS", "6"))
_AT_ONCE = 6


@pytest.fixture
def srun(isolated: Cluster, tmp_path: Path) -> Callable[..., "subprocess.Popen[str]"]:
    (tmp_path / "rank.py").write_text(_RANK)

    def start(*words: str, **variables: str) -> "subprocess.Popen[str]":
        command = isolated.command("srun", "--quiet", *words, cwd=tmp_path)
        env = {**os.environ, **variables}
        return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    return start


@pytest.mark.slow
@pytest.mark.timeout(60 + 3 * _PAIRS)
def test_jobs_that_start_at_once_at_one_port_of_one_node_never_meet(srun):
    """PAIRS=100 is the long form."""
    for first in range(0, _PAIRS, _AT_ONCE):
        pairs = [
            (srun("--nodes=2", "--nodelist=ssnode[1-2]", sys.executable, "rank.py", MASTER_PORT=str(port)))
            for port in range(12_000 + first, 12_000 + min(first + _AT_ONCE, _PAIRS))
            for _ in range(2)
        ]
        for step in pairs:
            lines = step.communicate(timeout=60)[0].splitlines()
            met = [re.fullmatch(r"rank \d of (job \d+\.0) met \['(.*)'\]", line) for line in lines]
            assert step.returncode == 0, lines
            assert len(met) == 2, lines
            assert {found and found[1] for found in met} == {found and found[2] for found in met}, lines


def test_two_steps_of_one_job_never_meet(isolated, tmp_path):
    (tmp_path / "rank.py").write_text(_RANK)
    step = f"srun --overlap --nodes=2 --ntasks=2 {sys.executable} rank.py &"
    words = ["--nodes=2", f"--wrap=export MASTER_PORT=12345; {step} {step} wait", "--output=out"]
    job = isolated.submit(*words, cwd=tmp_path)
    isolated.wait_state(job, "COMPLETED")
    met = re.findall(rf"rank \d of (job {job}\.\d) met \['(.*)'\]", (tmp_path / "out").read_text())
    assert sorted(met) == [(f"job {job}.{step}",) * 2 for step in (0, 0, 1, 1)]


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named_with_its_host(srun):
    words = ("--nodes=2", "--ntasks=3", "--nodelist=ssnode[2-3]", sys.executable, "rank.py")
    said = srun(*words, LATE="2", LIMIT="7").communicate(timeout=50)[0]
    assert "samestep: waiting for rank 2 (ssnode3); 5 s so far, 7 at most" in said
    for rank in (0, 1):
        assert f"rank {rank}: rank 2 (ssnode3) did not come within 7 s" in said


def test_a_host_name_that_leads_a_node_to_itself_is_named_with_its_line(srun, tmp_path):
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n127.0.1.1 ssnode1\n")
    inside = f'mount --bind {tmp_path}/hosts /etc/hosts; exec "$0" rank.py'
    words = ("--nodes=2", "--nodelist=ssnode[1-2]", "--kill-on-bad-exit=1", "unshare", "--mount")
    said = srun(*words, "sh", "-c", inside, sys.executable).communicate(timeout=50)[0]
    assert (
        "rank 1: ssnode2 resolves ssnode1 to 127.0.1.1 (/etc/hosts line 2), which is ssnode2 itself; "
        "correct that, or set MASTER_ADDR to an address of ssnode1"
    ) in said


def test_a_sites_suffix_chooses_the_network(srun, tmp_path):
    lines = ["127.0.0.1 localhost", *(f"10.77.0.{k} {node}.hsn" for k, node in enumerate(NODES, 1))]
    (tmp_path / "hosts").write_text("\n".join(lines) + "\n")
    inside = f'mount --bind {tmp_path}/hosts /etc/hosts; exec "$0" rank.py'
    words = ("--nodes=2", "--kill-on-bad-exit=1", "unshare", "--mount", "sh", "-c", inside, sys.executable)
    right = srun(*words, SAMESTEP_ADDRESS_SUFFIX=".hsn").communicate(timeout=50)[0]
    assert len(re.findall(r"rank \d of job \d+\.0 met", right)) == 2, right
    wrong = srun(*words, SAMESTEP_ADDRESS_SUFFIX="i").communicate(timeout=50)[0]
    assert re.search(r"rank 1: ssnode\d cannot resolve ssnode\di \(.*; SAMESTEP_ADDRESS_SUFFIX is i\)", wrong)


_STOPPED = """
import os, signal, samestep
from datetime import timedelta
world = samestep.init(timeout=timedelta(seconds=9))
if world.rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
samestep.sum(1)
"""


@pytest.mark.slow
def test_a_step_whose_rank_is_stopped_is_killed_once_the_others_have_failed(srun, tmp_path):
    (tmp_path / "stopped.py").write_text(_STOPPED)
    step = srun("--nodes=2", "--nodelist=ssnode[1-2]", "--kill-on-bad-exit=0", sys.executable, "stopped.py")
    said = step.communicate(timeout=60)[0]
    assert re.search(r"job step \d+\.\d+ is killed, since a rank of it gives no answer\n", said), said
    assert step.returncode == 137, said
