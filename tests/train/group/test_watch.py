"""Ranks that no launcher of ours watches say themselves who is missing."""

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
