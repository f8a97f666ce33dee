"""Launchers of several nodes that meet, fail, restart and end as one; here all on one machine."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

SHOW = """
import os
print(*(os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")))
"""
WAIT = """
import os, sys, time
with open(f"up{os.environ['RANK']}", "a") as file:
    file.write(f"{os.getpid()}\\n")
while not os.path.exists("go"):
    time.sleep(0.01)
if os.environ["RANK"] == "2":
    BAD
time.sleep(60)
"""
# A launcher that has another of its limits on waiting for other nodes.
LIMITED = """
from samestep.start import nodes
nodes.{} = {}
from samestep.cli import main
main()
"""
# The clock of a launcher that waits jumps by 100 s each of the first three times that it looks and finds nothing.
HASTY = """
import time
clock, sleep, slept = time.monotonic, time.sleep, []
time.sleep = lambda s: (slept.append(s), sleep(s))
time.monotonic = lambda: clock() + 100 * min(len(slept), 3)
from samestep.cli import main
main()
"""


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def started(launcher, sizes, *options, nodes=None):
    at = f"tcp://127.0.0.1:{free_port()}"
    several = ["--nodes", nodes or str(len(sizes)), "--rendezvous", at]
    return [
        launcher.start("-n", str(size), *several, "--node-rank", str(node), *options)
        for node, size in enumerate(sizes)
    ]


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (1, 2, 1)])
def test_ranks_are_counted_over_all_nodes_which_write_one_run_where_they_see_one_directory(launcher, sizes):
    launcher.write(SHOW)
    total = sum(sizes)
    ends = [node.finish() for node in reversed(started(launcher, sizes, "--tee", "all", "train.py"))][::-1]
    for node, (size, (code, out, err)) in enumerate(zip(sizes, ends, strict=True)):
        assert (code, err) == (0, "")
        first = sum(sizes[:node])
        lines = sorted(re.sub(r"^\[rank \d+\] ", "", line) for line in out.splitlines())
        assert lines == [f"{first + local} {total} {local} {size} {node}" for local in range(size)]
    (run,) = (launcher.home / "runs").iterdir()
    logs = sorted(path.name for path in (run / "logs").iterdir())
    assert logs == [f"rank-{rank}.log" for rank in range(total)]
    assert json.loads((run / "result.json").read_text())["exit_code"] == 0


@pytest.mark.parametrize(("bad", "code"), [("raise ValueError('broke')", 1), ("sys.exit(7)", 7)])
def test_a_failure_stops_the_other_nodes_at_once_and_gives_its_code(launcher, gone, bad, code):
    launcher.write(WAIT.replace("BAD", bad))
    nodes = started(launcher, (2, 2), "train.py")
    pids = [int(nodes[0].wait_for_lines(f"up{rank}")[0]) for rank in range(4)]
    (launcher.home / "go").touch()
    began = time.monotonic()
    ends = [node.finish() for node in nodes]
    assert time.monotonic() - began < 10
    gone(pids, 3)
    assert [end[0] for end in ends] == [code, code]
    head = rf"train\.py failed on rank 2 of 4 \({re.escape(os.uname().nodename)}\) after [\d.]+ s"
    assert re.match(rf"{head}\n\n", ends[1][2])
    assert re.fullmatch(rf"train\.py was stopped on node 0 \(.*\): {head}\n", ends[0][2])
    (run,) = (launcher.home / "runs").iterdir()
    assert re.match(head, json.loads((run / "result.json").read_text())["failure"])


@pytest.mark.slow
def test_a_rank_that_ends_before_init_on_another_node_is_named_in_time(launcher):
    launcher.write("""
        import os, sys
        if os.environ["RANK"] == "1":
            sys.exit()
        import samestep
        samestep.init()
    """)
    nodes = started(launcher, (1, 1), "train.py")
    ends = [node.finish() for node in nodes]
    assert [code for code, *_ in ends] == [1, 1]
    assert (
        "in samestep.init (train.py:6) for rank 1, which ended before it came to samestep.init" in ends[0][2]
    )


def test_a_launcher_that_is_killed_is_named_by_the_others(launcher):
    launcher.write(WAIT)
    nodes = started(launcher, (1, 1, 1), "train.py")
    for rank in range(3):
        nodes[0].wait_for_lines(f"up{rank}")
    nodes[1].process.kill()
    nodes[1].finish()
    for node in (0, 2):
        code, _, err = nodes[node].finish()
        assert code == 1
        assert re.search(r": node 1 \(.*\) was lost: its process has ended or its network is cut$", err, re.M)


# Every rank of the first start waits; a later start tells how many ranks it has, and ends.
LATER = """
import os, time
again, size, rank = (os.environ[name] for name in ("TORCHELASTIC_RESTART_COUNT", "WORLD_SIZE", "RANK"))
with open(f"up{again}-{size}", "a") as file:
    file.write(f"{rank}\\n")
while again == "0":
    time.sleep(0.01)
"""


@pytest.mark.parametrize("lost", [0, 2])
def test_the_nodes_that_are_left_go_on_without_a_lost_one(launcher, lost):
    launcher.write(LATER)
    nodes = started(launcher, (1, 1, 1), "--no-fork", "--max-restarts", "1", "train.py", nodes="2:3")
    nodes[0].wait_for_lines("up0-3", 3)
    nodes[lost].process.kill()
    nodes[lost].finish()
    for code, _, err in (node.finish() for node in nodes if node is not nodes[lost]):
        assert (code, "was lost" in err, "samestep: going on with 2 nodes" in err) == (0, True, True)
    assert sorted((launcher.home / "up1-2").read_text().split()) == ["0", "1"]


@pytest.mark.slow
def test_fewer_nodes_than_are_enough_do_not_go_on(launcher):
    launcher.write(LATER)
    launcher.way = ["-c", LIMITED.format("_AGAIN_S", 2)]  # instead of 20 s
    nodes = started(launcher, (1, 1, 1), "--no-fork", "--max-restarts", "1", "train.py", nodes="2:3")
    nodes[0].wait_for_lines("up0-3", 3)
    for node in nodes[1:]:
        node.process.kill()
    for node in nodes[1:]:
        node.finish()
    code, _, err = nodes[0].finish()
    assert (code, "was lost" in err) == (1, True)
    assert not (launcher.home / "up1-1").exists()


def test_a_node_that_comes_in_the_place_of_a_lost_one_is_waited_for(launcher):
    launcher.write(LATER)
    several = ("--nodes", "2", "--rendezvous", f"tcp://127.0.0.1:{free_port()}", "--max-restarts", "1")
    words = [("-n", "1", *several, "--no-fork", "--node-rank", str(node), "train.py") for node in range(2)]
    nodes = [launcher.start(*of_node) for of_node in words]
    nodes[0].wait_for_lines("up0-2", 2)
    nodes[1].process.kill()
    nodes[1].finish()
    again = launcher.start(*words[1])
    code, _, err = nodes[0].finish()
    assert (code, "samestep: going on with 2 nodes" in err, again.finish()[0]) == (0, True, 0)
    assert sorted((launcher.home / "up1-2").read_text().split()) == ["0", "1"]


def test_the_wait_for_another_node_ends_at_an_interrupt(launcher):
    launcher.write(LATER)
    nodes = started(launcher, (1, 1), "--no-fork", "--max-restarts", "1", "train.py")
    nodes[0].wait_for_lines("up0-2", 2)
    nodes[1].process.kill()
    nodes[1].finish()
    while "restart 1 of 1" not in nodes[0].process.stderr.readline():
        continue
    time.sleep(0.5)
    nodes[0].process.send_signal(signal.SIGINT)
    assert nodes[0].finish()[0] == 130


@pytest.mark.parametrize("option", [pytest.param("--fork", marks=pytest.mark.long), "--no-fork"])
def test_all_nodes_start_again_together(launcher, option):
    launcher.write(
        """
        import os, sys
        again = os.environ["TORCHELASTIC_RESTART_COUNT"]
        with open("seen", "a") as file:
            file.write(f"{again} {os.environ['RANK']}\\n")
        if again == "0" and os.environ["RANK"] == "1":
            raise ValueError("once")
        """
    )
    nodes = started(launcher, (1, 1), "--max-restarts", "1", option, "train.py")
    assert [node.finish()[0] for node in nodes] == [0, 0]
    assert {"1 0", "1 1"} <= set((launcher.home / "seen").read_text().splitlines())


def test_exit_code_75_of_all_is_the_exit_code_of_all(launcher):
    launcher.write("import sys; sys.exit(75)")
    assert [node.finish()[0] for node in started(launcher, (1, 2), "train.py")] == [75, 75]


@pytest.mark.slow
def test_an_interrupt_of_one_node_ends_all(launcher, gone):
    launcher.write(WAIT)
    nodes = started(launcher, (1, 1), "train.py")
    pids = [int(nodes[0].wait_for_lines(f"up{rank}")[0]) for rank in range(2)]
    began = time.monotonic()
    nodes[1].process.send_signal(signal.SIGINT)
    assert [node.finish()[0] for node in nodes] == [130, 130]
    assert time.monotonic() - began < 10
    gone(pids, 3)


@pytest.mark.slow
def test_a_run_that_stays_incomplete_names_who_is_missing(launcher):
    launcher.write(SHOW)
    where = ["--nodes", "3", "--rendezvous", f"tcp://127.0.0.1:{free_port()}", "--wait", "6"]
    nodes = [launcher.start("-n", "1", *where, "--node-rank", str(node), "train.py") for node in (0, 2)]
    for node in nodes:
        code, _, err = node.finish()
        assert code == 1
        assert err.endswith("samestep: node 1 did not come within 6 s\n")


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (["new.py"], ["old.py"], ["'new.py'", "'old.py'"]),
        (["-m", "new"], ["./new.py"], ["'-m new'", "'new.py'"]),
    ],
)
def test_nodes_that_run_two_scripts_are_both_told_so_at_once(launcher, first, second, said):
    for name in ("new.py", "old.py"):
        launcher.write("open('ran', 'w')", name)
    where = ["-n", "1", "--nodes", "2", "--rendezvous", f"tcp://127.0.0.1:{free_port()}", "--node-rank"]
    began = time.monotonic()
    nodes = [launcher.start(*where, "1", *second), launcher.start(*where, "0", *first)]
    here = socket.gethostname()
    sentence = (
        f"samestep: node 0 ({here}) runs {said[0]} and node 1 ({here}) runs {said[1]}; run one script on all nodes, "
        "or let each run meet at a port or place of its own\n"
    )
    assert [node.finish() for node in nodes] == [(1, "", sentence)] * 2
    assert time.monotonic() - began < 10
    assert not (launcher.home / "ran").exists()


@pytest.mark.parametrize("kind", ["absolute", "argument", "program"])
def test_what_may_differ_between_machines_does_not_keep_nodes_apart(launcher, kind):
    launcher.write(SHOW)
    (launcher.home / "py").symlink_to(sys.executable)
    first, second = {
        "absolute": (["train.py"], [f"{launcher.home}/train.py"]),
        "argument": (["train.py", "--data", "/a"], ["train.py", "--data", "/b"]),
        "program": (["--no-python", sys.executable, "train.py"], ["--no-python", "./py", "train.py"]),
    }[kind]
    where = ["-n", "1", "--nodes", "2", "--rendezvous", f"tcp://127.0.0.1:{free_port()}", "--node-rank"]
    nodes = [launcher.start(*where, "1", *second), launcher.start(*where, "0", *first)]
    assert [node.finish()[0] for node in nodes] == [0, 0]


def test_a_stale_rendezvous_file_is_replaced(launcher):
    launcher.write(SHOW)
    meet = launcher.home / "meet"
    meet.write_text(json.dumps({"places": [["127.0.0.1", free_port()]], "mark": "00"}))
    where = ["--nodes", "2", "--rendezvous", f"file://{meet}"]
    nodes = [launcher.start("-n", "1", *where, "--node-rank", str(node), "train.py") for node in (1, 0)]
    assert [node.finish()[0] for node in nodes] == [0, 0]
    assert not meet.exists()


@pytest.mark.parametrize("kind", ["file", "tcp"])
def test_a_node_that_starts_minutes_before_the_first_waits_for_it(launcher, kind):
    launcher.write(SHOW)
    at = f"file://{launcher.home}/meet" if kind == "file" else f"tcp://127.0.0.1:{free_port()}"
    where = ["-n", "1", "--nodes", "2", "--rendezvous", at, "--wait", "900", "--node-rank"]
    command = [sys.executable, "-c", HASTY, "run", *where, "1", "train.py"]
    with subprocess.Popen(
        command, cwd=launcher.home, env=launcher.env, stderr=subprocess.PIPE, text=True
    ) as early:
        try:
            said = [early.stderr.readline() for _ in range(3)]
            assert re.search(
                r"^samestep: node 1.* looks for node 0 \(.+\); 30\d s so far, 900 at most$", said[-1]
            )
            assert launcher.run(*where, "0", "train.py") == (0, "0 2 0 1 0\n", "")
            assert (early.wait(30), early.stderr.read()) == (0, "")
        finally:
            early.kill()


def test_a_first_node_that_leaves_no_note_is_waited_for_as_long_as_was_said(launcher):
    launcher.write(SHOW)
    where = [
        "--nodes",
        "2",
        "--node-rank",
        "1",
        "--rendezvous",
        f"file://{launcher.home}/meet",
        "--wait",
        "1",
    ]
    here = re.escape(socket.gethostname())
    code, out, err = launcher.run("-n", "1", *where, "train.py")
    assert (code, out) == (1, "")
    assert re.fullmatch(
        r"samestep: node 1 of file://.*/meet found no node 0 within 1 s \(there is no note of it at .*/meet, which all "
        rf"nodes have to see\); is node 0 started, and can {here} reach it\?\n",
        err,
    )


@pytest.mark.slow
@pytest.mark.parametrize("asked", [None, signal.SIGINT])
def test_a_node_that_has_finished_waits_as_long_as_the_others_work_or_until_it_is_asked_to_end(
    launcher, asked
):
    launcher.write(
        """
        import os, time
        open(f"up{os.environ['RANK']}", "w").write("up\\n")
        time.sleep(4 if os.environ["RANK"] == "0" else 0)
        """
    )
    launcher.way = ["-c", LIMITED.format("_END_S", 0.5)]  # what a node has to end in where another has failed
    nodes = started(launcher, (1, 1), "train.py")
    nodes[1].wait_for_lines("up1")
    time.sleep(2)
    assert nodes[1].process.poll() is None
    if asked:
        nodes[1].process.send_signal(asked)
        began = time.monotonic()
        assert nodes[1].finish()[0] == 130
        assert time.monotonic() - began < 1.5
    else:
        assert [node.finish()[0] for node in nodes] == [0, 0]
