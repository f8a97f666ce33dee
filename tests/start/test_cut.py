"""Nodes in networks of their own: a cut one is missed at once, and one with a directory of its own is remarked."""

import re
import subprocess
import sys
import time

import pytest
from tests.cluster.network import Network, possible

NODES = ["sscut1", "sscut2"]
STEPS = """
import os, time
if os.environ["RANK"] == "0":
    print("up", flush=True)
time.sleep(SECONDS)
"""


@pytest.fixture
def nodes(tmp_path):
    """Starts a launcher on each node; one that has another folder than the first does not see the first's."""
    if not possible():
        pytest.skip("only root may make networks")
    network, started = Network(tmp_path / "hosts", NODES), []

    def start(seconds, *folders):
        command = f"run -n1 --nodes 2 --rendezvous tcp://{network.address[NODES[0]]}:29733".split()
        for number, folder in enumerate(folders):
            (tmp_path / folder).mkdir(exist_ok=True)
            (tmp_path / folder / "train.py").write_text(STEPS.replace("SECONDS", str(seconds)))
            if folder != folders[0]:
                hide = ("mount", "-t", "tmpfs", "none", str(tmp_path / folders[0]))
                subprocess.run([*network.enter(NODES[number]), *hide], check=True)
            inside = [*network.enter(NODES[number]), "env", "-C", str(tmp_path / folder)]
            words = [sys.executable, "-m", "samestep", *command, "--node-rank", str(number), "train.py"]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            started.append(subprocess.Popen([*inside, *words], **pipes))
        return network, started

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()
    network.close()


@pytest.mark.slow
def test_a_cut_node_is_missed_within_six_seconds(nodes):
    network, (first, second) = nodes(40, "both", "both")
    assert first.stdout.readline() == "up\n"
    network.cut(NODES[1])
    began = time.monotonic()
    said = first.communicate()[0], second.communicate()[0]
    assert time.monotonic() - began < 9  # with the second that workers have to end
    assert re.search("node 1.* was lost: its process has ended or its network is cut", said[0]), said
    assert re.search("node 0.* was lost: its process has ended or its network is cut", said[1]), said


@pytest.mark.slow
def test_a_node_that_does_not_see_the_runs_directory_is_remarked(nodes):
    _, (first, _) = nodes(0, "one", "another")
    assert first.wait() == 0
    said = first.stdout.read()
    assert re.search(
        "runs/.* cannot be seen on sscut2, so the logs of the ranks there are in a directory", said
    )
