"""Ranks of a real Slurm step that a host file has placed; they need no torch."""

import re
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.slurm

_RANK = """
from samestep.placement.place import this_process
from samestep.rendezvous.ranks import connect_ranks
here = this_process()
peers = connect_ranks(here, 30)
print(f"rank {here.rank} on node {here.node} met {len(peers.gather(0, 20))}", flush=True)
"""


def test_ranks_meet_also_where_rank_0_is_not_on_the_first_node(isolated, tmp_path):
    (tmp_path / "rank.py").write_text(_RANK)
    (tmp_path / "hosts").write_text("ssnode2\nssnode1\nssnode2\n")
    variables = (f"SLURM_HOSTFILE={tmp_path / 'hosts'}", f"SAMESTEP_RUN_DIR={tmp_path}")
    srun = ("srun", "--quiet", "--distribution=arbitrary", "--ntasks=3", sys.executable, "rank.py")
    words = isolated.command("env", *variables, *srun, cwd=tmp_path)
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=50)
    met = sorted(re.findall(r"rank \d on node \d met \d", done.stdout))
    assert met == ["rank 0 on node 1 met 3", "rank 1 on node 0 met 3", "rank 2 on node 1 met 3"], done.stdout


def test_a_batch_script_that_a_rank_submitted_is_not_in_that_ranks_step(isolated, tmp_path):
    said = tmp_path / "said"
    env = f"{sys.executable} -m samestep env"
    (tmp_path / "job.sh").write_text(f"#!/bin/sh\n({env}; srun {env}) > said 2> notes; echo >> said\n")
    submit = "test $SLURM_PROCID = 1 || sbatch --quiet --ntasks=2 --nodes=2 job.sh"
    isolated.run("srun", "--ntasks=2", "--nodes=2", "sh", "-c", submit, cwd=tmp_path)
    until = time.monotonic() + 30
    while not (said.exists() and said.read_text().endswith("\n\n")):
        assert time.monotonic() < until
        time.sleep(0.1)
    script, *ranks = said.read_text().split("\n")
    assert script == "rank 0 of 1, local rank 0 of 1, node 0 of 1, started alone"
    assert sorted(rank.partition(",")[0] for rank in ranks if rank) == ["rank 0 of 2", "rank 1 of 2"]
