import random

import pytest
from fournodes import Cluster

from samestep.placement.nodelist import expand_nodes

pytestmark = pytest.mark.slurm


def _ranges(rng: random.Random) -> str:
    parts = []
    for _ in range(rng.randint(1, 4)):
        width, first = rng.randint(1, 4), rng.randint(0, 120)
        last = first + rng.randint(0, 9)
        low, high = str(first).zfill(width), str(last).zfill(width)
        parts.append(low if rng.random() < 0.4 else f"{low}-{high}")
    return f"[{','.join(parts)}]"


def _node_list(rng: random.Random) -> str:
    # Never a text after the last bracket: Slurm itself refuses it.
    def name() -> str:
        stem = rng.choice(("n", "node", "r1i", "gpu-a", "jean-zay-ia8", "x1000c0s"))
        first = rng.choice((_ranges(rng), str(rng.randint(0, 99)), ""))
        second = rng.choice(("", "", "b", "-", "n1-")) + _ranges(rng)
        return stem + (first + second if rng.random() < 0.4 else first or "x")

    return ",".join(name() for _ in range(rng.randint(1, 4)))


def test_300_random_node_lists_expand_as_scontrol_does_and_in_its_order(cluster: Cluster) -> None:
    rng = random.Random(5)
    lists = [_node_list(rng) for _ in range(300)]
    # One shell for all: each call is quick, starting it on the cluster 300 times would not be.
    loop = 'for list; do echo "$(scontrol show hostnames "$list" | tr "\\n" " ")"; done'
    said = cluster.run("bash", "-c", loop, "bash", *lists).splitlines()
    for text, answer in zip(lists, said, strict=True):
        assert expand_nodes(text) == answer.split(), text
