"""A script that starts and numbers its own processes, or that an older launcher starts, joins as one run."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from samestep.measure.runs import list_runs

# One write: torchrun's Pythons are unbuffered, and all write to one pipe.
SAY = r"print(f'{w.rank} {w.size} {w.local_rank} {samestep.sum(1)}\n', end='', flush=True)"
SPAWNED = f"""
import sys, torch.multiprocessing as mp, samestep
def main(rank, at):
    w = samestep.init(rank=rank, size=2, rendezvous=at)
    {SAY}
if __name__ == "__main__":
    mp.spawn(main, args=(sys.argv[1],), nprocs=2)
"""
FLAGS = f"""
import argparse, samestep
parser = argparse.ArgumentParser()
for name in ("rank", "world-size", "local-rank"):
    parser.add_argument(f"--{{name}}", type=int)
args = parser.parse_args()
w = samestep.init(rank=args.rank, size=args.world_size)
{SAY}
"""
SHOW = "import os; print(os.environ['RANK'], os.environ['WORLD_SIZE'])"


def port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as held:
        return str(held.getsockname()[1])


def start(
    folder: Path, source: str, *words: str, before: tuple[str, ...] = (), **env: str
) -> subprocess.Popen[str]:
    (folder / "train.py").write_text(source)
    command = [sys.executable, *before, "train.py", *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=folder, env=os.environ | env, **pipes)


def lines(*processes: subprocess.Popen[str]) -> list[str]:
    found = []
    for process in processes:
        out, err = process.communicate(timeout=55)
        assert process.returncode == 0, err
        found += out.splitlines()
    return sorted(found)


@pytest.mark.slow
def test_processes_that_a_script_spawns_are_given_rank_size_and_place_by_it(tmp_path):
    spawned = start(tmp_path, SPAWNED, f"tcp://127.0.0.1:{port()}")
    assert lines(spawned) == [f"{rank} 2 {rank} 2" for rank in range(2)]


@pytest.mark.slow
def test_processes_that_are_started_by_hand_hand_their_flags_on(nest, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(FLAGS)
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port()}
    flags = [("--rank", rank, "--world-size", 2) for rank in (1, 0)]
    ranks = [rank for words in flags for rank in nest.start(script, 0, *words, env=env)]
    assert nest.wait(ranks) == [0, 0], [rank.said for rank in ranks]
    assert [rank.said for rank in ranks] == ["1 2 1 2\n", "0 2 0 2\n"]


@pytest.mark.slow
def test_torchrun_is_adopted_also_by_its_older_name_which_gives_a_flag(tmp_path):
    before = ("-m", "torch.distributed.launch", "--nproc-per-node=2", f"--master-port={port()}")
    also = r"print(f'{w.rank} {w.launcher} {torch.get_num_threads()}\n', end='', flush=True)"
    source = f"{FLAGS}import torch\n{also}\n"
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    said = [line for rank in range(2) for line in (f"{rank} 2 {rank} 2", f"{rank} torchrun {threads}")]
    assert lines(start(tmp_path, source, before=before)) == said
    (run,) = list_runs(tmp_path / "runs")
    assert (run.state, run.size, len(run.logs)) == ("done", 2, 2)


def test_nodes_meet_where_the_environment_says(tmp_path):
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port()}
    before = ("-m", "samestep", "run", "-n1", "--nodes=2", "--rendezvous=env://")
    nodes = [start(tmp_path, SHOW, before=(*before, f"--node-rank={k}"), **env) for k in (1, 0)]
    assert lines(*nodes) == ["0 2"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        pytest.param(
            "rank=0", "init got rank= without size=; give both, as whole numbers", marks=pytest.mark.slow
        ),
        ("rank=0, size=2, rendezvous='file:///x'", "is not a meeting point; write tcp://HOST:PORT or env://"),
        ("rank=2, size=2, rendezvous='tcp://127.0.0.1:1'", "RANK is 2 but WORLD_SIZE is 2; count from 0"),
    ],
)
def test_numbers_that_cannot_be_are_refused(nest, tmp_path, given, said):
    script = tmp_path / "train.py"
    script.write_text(f"import samestep\nsamestep.init({given})\n")
    (process,) = nest.start(script, 0)
    assert nest.wait([process]) == [1]
    assert said in process.said


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--fork",)])
def test_a_rank_whose_script_removes_its_launchers_variables_says_that_it_trains_alone(options, launcher):
    launcher.write("import os, samestep\nos.environ.clear()\nprint(samestep.init().size)")
    code, out, err = launcher.run("-n", "2", *options, "train.py")
    assert (code, out) == (0, "1\n")
    assert "this process runs alone, and it was started as one of 2" in err


def test_a_rank_that_goes_on_by_execve_without_its_variables_is_known_to_be_one_of_several(launcher):
    launcher.write("""
        import os, sys
        from samestep.placement.place import this_process
        if "RANK" in os.environ:
            os.execve(sys.executable, [sys.executable, "train.py"], {})
        print(this_process().notes)
    """)
    code, out, _ = launcher.run("-n", "2", "--tee", "all", "train.py")
    assert (code, out.count("this process runs alone, and it was started as one of 2: its launcher's")) == (
        0,
        2,
    )


@pytest.mark.slow
def test_a_process_that_a_rank_starts_without_its_variables_says_that_it_trains_alone(launcher):
    launcher.write("import samestep\nprint(samestep.init().size)", "other.py")
    launcher.write("import os, subprocess, sys\nsubprocess.run([sys.executable, 'other.py'], env={})")
    code, out, err = launcher.run("-n", "2", "train.py")
    assert (code, out) == (0, "1\n")
    assert "which started it, was started as one of 2" in err
