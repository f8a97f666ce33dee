"""Ranks that no launcher of ours watches say themselves who is missing, and which of them failed."""

import re
import time

import pytest
from forked import end_group
from hang import SCRIPT

WAITED = "samestep: ranks 0, 2 have waited"  # for about as long


@pytest.mark.parametrize(("kind", "says"), [("sleep", "is in sleep (stuck.py:"), ("stop", "gives no answer")])
def test_under_another_launcher_the_first_rank_that_waits_names_the_missing_one(nest, tmp_path, kind, says):
    ranks = nest.start(SCRIPT, 3, "--kind", kind, cwd=tmp_path)
    try:
        until = time.monotonic() + 40
        while WAITED not in ranks[0].said:
            assert time.monotonic() < until, [rank.said for rank in ranks]
            nest.look(0.2)
        said = next(line for line in ranks[0].said.splitlines() if line.startswith(WAITED))
        assert "in the gradient exchange (stuck.py:" in said
        assert f"for rank 1, which {says}" in said
        assert "have waited" not in ranks[2].said
    finally:
        for rank in ranks:
            end_group(rank)
        nest.wait(ranks, 5)


FAILS = """
import sys
import torch
import samestep

world = samestep.init()
data = torch.utils.data.TensorDataset(torch.rand(12, 2))
model = samestep.replicate(torch.nn.Linear(2, 1))
for step, (x,) in enumerate(samestep.loader(data, 3)):
    model(x).sum().backward()
    if step == 2 and world.rank == 1:
        open("/data/volume-7.bin")
samestep.sum(1)
"""


def test_under_another_launcher_the_rank_that_failed_reports_and_the_others_say_a_line(nest, tmp_path):
    (tmp_path / "train.py").write_text(FAILS)
    ranks = nest.start(tmp_path / "train.py", 3, cwd=tmp_path)
    nest.wait(ranks, 40)
    head, _, rest = ranks[1].said.rpartition("train.py failed on rank 1 of 3 (")[2].partition("\n\n")
    assert re.fullmatch(r"\S+, cpu\) after \d+(\.\d)? s, in step 3", head)
    assert rest == (
        '  train.py:12 in <module>\n    open("/data/volume-7.bin")\n'
        "FileNotFoundError: [Errno 2] No such file or directory: '/data/volume-7.bin'\n"
    )
    for rank in (0, 2):
        assert "Traceback" not in ranks[rank].said
        lines = [line for line in ranks[rank].said.splitlines() if line.startswith("samestep: ")]
        assert re.match(rf"samestep: rank {rank} of 3 ended in train.py:1[0-3] in <module>: ", lines[-1])
        assert ranks[rank].code == 1
