"""Ranks of a real Slurm step that a host file has placed; they need no torch."""

import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slurm

_RANK = """
from samestep.placement import this_process
from samestep.meeting.ranks import circle_of
here = this_process()
circle = circle_of(here, 30)
print(f"rank {here.rank} on node {here.node} met {len(circle.gather(0, 20))}", flush=True)
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
