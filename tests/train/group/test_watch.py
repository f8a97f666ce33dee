"""Ranks that no launcher of ours watches say themselves who is missing, and which of them failed."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from textwrap import dedent

import pytest
from forked import end_group
from hang import SCRIPT

from samestep.measure.runs import list_runs

WAITED = "samestep: ranks 0, 2 have waited"  # for about as long


@pytest.mark.slow
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


IN_A_THREAD = """
    import threading, time, torch, samestep

    def read():
        time.sleep(1000)

    def train():
        rank = samestep.init().rank
        data = torch.utils.data.TensorDataset(torch.randn(6, 4), torch.randn(6, 1))
        model = samestep.replicate(torch.nn.Linear(4, 1))
        for x, y in samestep.loader(data, batch_size=6):
            if rank == 1:
                read()
            (model(x) - y).square().mean().backward()

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    thread.join()
"""


@pytest.mark.slow
def test_a_rank_that_trains_in_a_thread_is_named_with_the_line_of_that_thread(nest, tmp_path):
    script = tmp_path / "thread.py"
    script.write_text(dedent(IN_A_THREAD))
    ranks = nest.start(script, 2, cwd=tmp_path)
    try:
        until = time.monotonic() + 40
        while "rank 0 has waited" not in ranks[0].said:
            assert time.monotonic() < until, [rank.said for rank in ranks]
            nest.look(0.2)
        says = r"in the gradient exchange \(thread.py:14\) for rank 1, which is in read \(thread.py:5\)"
        assert re.search(says, ranks[0].said), ranks[0].said
    finally:
        for rank in ranks:
            end_group(rank)
        nest.wait(ranks, 5)


@pytest.mark.slow
def test_where_rank_0_is_silent_nothing_is_said_of_ranks_that_are_heard_through_it(nest, tmp_path):
    ranks = nest.start(SCRIPT, 3, "--kind", "stop", "--rank", "0", cwd=tmp_path)
    try:
        until = time.monotonic() + 40
        while not all("has waited" in rank.said for rank in ranks[1:]):
            assert time.monotonic() < until, [rank.said for rank in ranks]
            nest.look(0.2)
        for number, rank in enumerate(ranks[1:], 1):
            (said,) = re.findall(rf"rank {number} has waited .* for (.*), which gives no answer", rank.said)
            assert said == "rank 0"
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


IN_FINALLY = """
import samestep

rank = samestep.init().rank
try:
    if rank == 1:
        raise ValueError("mine")
    samestep.sum(1)
finally:
    samestep.save("model.pt", {})
"""


def test_under_another_launcher_a_rank_whose_finally_calls_others_reports_its_exception(nest, tmp_path):
    (tmp_path / "train.py").write_text(IN_FINALLY)
    ranks = nest.start(tmp_path / "train.py", 2, cwd=tmp_path)
    nest.wait(ranks, 40)
    report = ranks[1].said.partition("train.py failed on rank 1 of 2 (")[2]
    assert report.endswith("\nwhile it handled ValueError: mine (train.py:7)\n")
    assert "failed on rank" not in ranks[0].said


ALIKE = """
import samestep

samestep.init()
samestep.sum(1)
open("/data/volume-7.bin")
"""


def test_under_another_launcher_an_exception_of_all_ranks_is_printed_once(nest, tmp_path):
    (tmp_path / "train.py").write_text(ALIKE)
    ranks = nest.start(tmp_path / "train.py", 3, cwd=tmp_path)
    assert nest.wait(ranks, 40) == [1, 1, 1]
    (first,) = [at for at, rank in enumerate(ranks) if "Traceback" in rank.said]
    for at, rank in enumerate(ranks):
        alike = f"rank {at} of 3 failed as rank {first} did: FileNotFoundError: [Errno 2] No such file or directory"
        ended = f"rank {at} is ended, since rank "
        assert at == first or re.match(f"samestep: ({re.escape(alike)}|{ended})", rank.said), rank.said


LEAVES = """
import os, sys, samestep
rank = samestep.init().rank
if rank == 1:
    {"exit": lambda: sys.exit(7), "end": lambda: None}.get(sys.argv[1], lambda: os._exit(5))()
elif sys.argv[1] == "in torch":
    import torch
    torch.distributed.all_reduce(torch.ones(1))
else:
    samestep.sum(1)
"""
AT_THE_END = (
    "samestep: rank {0} of 3 ended in .*RanksDiffer: ranks are at different calls: rank 1 at the end of the "
)
LOST = (
    r"samestep: rank {0} of 3 ended in .*: rank 1 \(.*\) was lost: .*, while this rank was in samestep.sum \("
)
WAYS = {
    "exit": ([7, 7, 7], "samestep: rank 1 of 3 left the script at train.py:5 with exit code 7\n", AT_THE_END),
    "os": ([1, 5, 1], "", LOST),
    "in torch": (
        [1, 5, 1],
        "",
        r"samestep: rank {0} of 3 ended in train.py:8 in <module>: rank 1 \(.*\) was lost",
    ),
    "end": ([1, 0, 1], "", AT_THE_END),
}


@pytest.mark.slow
def test_under_another_launcher_a_rank_that_leaves_while_others_wait_is_named_and_tells_its_code(
    nest, tmp_path
):
    (tmp_path / "train.py").write_text(LEAVES)
    started = {way: nest.start(tmp_path / "train.py", 3, way, cwd=tmp_path) for way in WAYS}
    for way, (codes, own, others) in WAYS.items():
        ranks = started[way]
        assert nest.wait(ranks, 40) == codes, [rank.said for rank in ranks]
        assert ranks[1].said == own
        for rank in (0, 2):
            assert re.match(others.format(rank), ranks[rank].said), ranks[rank].said
            assert "Traceback" not in ranks[rank].said


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize(
    ("launcher", "says"),
    [
        ("mpirun.openmpi --allow-run-as-root --oversubscribe -n 2", "Exit code: +7"),
        (
            f"{Path(sys.executable).with_name('torchrun')} --standalone --nproc-per-node 2 --no-python",
            "exitcode  : 7",
        ),
    ],
    ids=["mpirun", "torchrun"],
)
def test_a_real_launcher_hears_the_code_of_the_rank_that_left_first(tmp_path, launcher, says):
    if shutil.which(launcher.split()[0]) is None:
        pytest.skip("mpirun.openmpi is not installed")
    (tmp_path / "train.py").write_text(LEAVES)
    command = [*launcher.split(), sys.executable, "train.py", "exit"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("SAMESTEP")}
    ended = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    said = ended.stdout + ended.stderr
    assert "samestep: rank 1 of 2 left the script at train.py:5 with exit code 7" in said
    assert re.search(says, said.rpartition("first")[2]), said


RAISES = """
import samestep
samestep.init()
samestep.sum(1)
raise SystemExit(7)
"""


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize("mpirun", ["mpirun.openmpi --allow-run-as-root --oversubscribe", "mpirun.mpich"])
def test_the_code_of_a_raised_system_exit_is_the_runs_where_mpirun_starts_it(tmp_path, mpirun):
    (tmp_path / "train.py").write_text(RAISES)
    command = [*mpirun.split(), "-n", "2", sys.executable, "train.py"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("SAMESTEP")}
    assert subprocess.run(command, env=env, cwd=tmp_path, capture_output=True).returncode == 7
    (run,) = list_runs(tmp_path / "runs")
    assert run.ended.code == 7


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize("rank", [0, 1])
def test_a_run_of_mpirun_that_a_rank_left_by_os_exit_names_that_rank_its_line_and_code(tmp_path, rank):
    (tmp_path / "train.py").write_text(
        f"import os, samestep\nif samestep.init().rank == {rank}:\n    os._exit(7)\nsamestep.sum(1)\n"
    )
    command = f"mpirun.openmpi --allow-run-as-root --oversubscribe -n 2 {sys.executable} train.py"
    env = {name: value for name, value in os.environ.items() if not name.startswith("SAMESTEP")}
    assert subprocess.run(command.split(), env=env, cwd=tmp_path, capture_output=True).returncode == 7
    (run,) = list_runs(tmp_path / "runs")
    until = time.monotonic() + 10
    while not run.is_over and time.monotonic() < until:  # mpirun may end before the other rank
        time.sleep(0.2)
        (run,) = list_runs(tmp_path / "runs")
    assert run.state == "failed (7)"
    assert run.facts()["failure"] == f"rank {rank} left the script at train.py:3\nexit code 7"


@pytest.mark.slow
@pytest.mark.mpi
def test_a_run_of_mpirun_that_its_ranks_leave_by_os_exit_0_is_done(tmp_path):
    (tmp_path / "train.py").write_text("import os, samestep\nsamestep.init()\nsamestep.sum(1)\nos._exit(0)\n")
    command = f"mpirun.openmpi --allow-run-as-root --oversubscribe -n 2 {sys.executable} train.py"
    env = {name: value for name, value in os.environ.items() if not name.startswith("SAMESTEP")}
    assert subprocess.run(command.split(), env=env, cwd=tmp_path).returncode == 0
    (run,) = list_runs(tmp_path / "runs")
    assert run.state == "done"


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize("launcher", ["mpirun.openmpi --allow-run-as-root --oversubscribe -n 3", "torchrun"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_run_of_another_launcher_names_the_rank_that_was_killed(tmp_path, launcher, rank):
    if launcher == "torchrun":
        launcher = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 3 --no-python"
    (tmp_path / "train.py").write_text(
        "import os, signal, samestep\n"
        f"if samestep.init().rank == {rank}:\n    os.kill(os.getpid(), signal.SIGKILL)\nsamestep.sum(1)\n"
    )
    command = [*launcher.split(), sys.executable, "train.py"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("SAMESTEP")}
    assert subprocess.run(command, env=env, cwd=tmp_path, capture_output=True).returncode != 0
    (run,) = list_runs(tmp_path / "runs")
    until = time.monotonic() + 10
    while not run.is_over and time.monotonic() < until:
        time.sleep(0.2)
        (run,) = list_runs(tmp_path / "runs")
    where, what = run.facts()["failure"].split("\n")
    assert (where, run.state) == (f"rank {rank}", "failed (137)")
    if "torch.distributed.run" in launcher:  # it looks at its processes ten times a second
        assert what == "killed by SIGKILL"
    else:  # it may remove the process before anybody could read by which signal it ended
        assert what.partition(", most likely: ")[0] == "killed by SIGKILL"


STUCK = """
import sys, threading, time
import samestep.train.group.watch as watch
watch.STUCK_S = 6.0
import samestep
rank = samestep.init().rank
if rank:
    threading.Thread(target=time.sleep, args=(99,)).start()
    sys.exit()
samestep.sum(1)
"""


@pytest.mark.slow
def test_a_rank_that_left_and_does_not_end_is_named_under_another_launcher_and_stop_ends_the_run(
    nest, tmp_path
):
    """As mpirun starts ranks: they have a directory, and no launcher of ours watches them."""
    (tmp_path / "train.py").write_text(STUCK)
    of_mpi = {"OMPI_COMM_WORLD_SIZE": 2, "OMPI_COMM_WORLD_LOCAL_SIZE": 2, "PMIX_NAMESPACE": os.getpid()}
    ranks = []
    for rank in range(2):
        env = of_mpi | {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_LOCAL_RANK": rank}
        ranks += nest.start(tmp_path / "train.py", 0, env=env, cwd=tmp_path)
    try:
        until = time.monotonic() + 40
        while "for rank 1, which left the script at train.py:9\n" not in ranks[0].said:
            assert time.monotonic() < until, [rank.said for rank in ranks]
            nest.look(0.2)
        (record,) = (tmp_path / "runs").glob("*/run.json")
        record.with_name("stop").touch()
        assert nest.wait(ranks, 40) == [143, 143]
        # the first rank that sees the file may stop the other, which then says nothing
        assert any("is ended by `samestep stop`" in rank.said for rank in ranks)
    finally:
        for rank in ranks:
            end_group(rank)
        nest.wait(ranks, 5)


@pytest.mark.slow
@pytest.mark.parametrize(("way", "code"), [("sys.exit(7)", 7), ("raise ValueError", 1)])
def test_under_another_launcher_a_rank_that_left_and_goes_on_in_a_thread_ends_with_those_that_wait(
    nest, tmp_path, way, code
):
    (tmp_path / "train.py").write_text(STUCK.replace("sys.exit()", way))
    ranks = nest.start(tmp_path / "train.py", 2, cwd=tmp_path)
    assert nest.wait(ranks, 40) == [code, code], [rank.said for rank in ranks]
    assert "samestep: rank 1 is ended, for which others wait: it " in ranks[1].said


@pytest.mark.slow
def test_a_rank_is_ended_that_waits_for_one_whose_connections_of_gloo_outlive_it(nest, tmp_path):
    """As where the rank goes on as another program, or a child of it keeps them; nothing would tell the others."""
    script = FAILS.replace("import sys\n", "import os\n")
    (tmp_path / "train.py").write_text(
        script.replace('open("/data/volume-7.bin")', 'os.execlp("sleep", "sleep", "60")')
    )
    ranks = nest.start(tmp_path / "train.py", 2, cwd=tmp_path)
    try:
        nest.wait(ranks[:1], 40)
        assert ranks[0].code == 1
        assert re.search(
            r"rank 0 is ended in the gradient exchange \(train.py:10\): rank 1 .* was lost", ranks[0].said
        )
    finally:
        for rank in ranks:
            end_group(rank)
        nest.wait(ranks, 5)
