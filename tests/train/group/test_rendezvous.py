"""What a launcher did not say of a rank's place is counted once the ranks have met."""

import pytest

from samestep.placement.place import ASSUMED, Placement
from samestep.rendezvous.position import Position
from samestep.train.group.rendezvous import placed

SECOND_MACHINE = Position([0], [], [], node=1, nodes=2, local_rank=0, local_size=1, sharing={}, address="")


@pytest.mark.parametrize(
    ("origin", "local"),
    [({"local_rank": ASSUMED}, (0, 1)), ({"local_rank": "LOCAL_RANK=1"}, (1, 2)), ({}, (1, 2))],
    ids=["assumed", "told", "by a launcher of ours"],
)
def test_a_local_rank_that_was_assumed_is_counted_on_its_machine(origin, local):
    found = placed(Placement(1, 2, 1, 2, 0, 1, "alone", origin=origin), SECOND_MACHINE)
    assert (found.node, found.nodes) == (1, 2)
    assert (found.local_rank, found.local_size) == local


def test_a_local_rank_that_the_launcher_told_is_not_replaced():
    origin = {"node": "GROUP_RANK=0", "local_rank": "LOCAL_RANK=1"}
    here = Placement(1, 2, 1, 2, 0, 1, "torchrun", origin=origin)
    assert placed(here, SECOND_MACHINE) == here


def test_an_interface_that_is_not_there_is_said_with_the_variable_that_names_it(nest, tmp_path):
    script = tmp_path / "init.py"
    script.write_text("import samestep\nsamestep.init()\n")
    ranks = nest.start(script, 2, env={"GLOO_SOCKET_IFNAME": "nosuch0"})
    nest.wait(ranks, 20)
    for rank in ranks:
        assert rank.code == 1
        assert "Unable to find address for: nosuch0\n" in rank.said
        assert "correct GLOO_SOCKET_IFNAME, or leave it unset" in rank.said
