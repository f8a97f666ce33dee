import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from fournodes import NODES, Cluster

from samestep.rundir import failure_path, pulse_path, read_pulse

pytestmark = pytest.mark.slurm

_NASTY = (
    "two words",
    "$(touch canary)",
    "`touch canary`",
    "; touch canary",
    "it's",
    'a "b" \\ c',
    "*",
    "#",
    "é",
    "%j",
)

_REPORT = """
import json, os, sys
rank = os.environ["SLURM_PROCID"]
where = f"{os.environ['SLURM_JOB_NAME']}-{os.environ.get('SLURM_ARRAY_TASK_ID', '')}-{rank}.json"
with open(where, "w") as file:
    json.dump({"argv": sys.argv, "env": dict(os.environ)}, file)
print(f"rank {rank} was here")
"""

_STEPS = """
import torch, samestep
model = samestep.replicate(torch.nn.Linear(8, 8))
for (x,) in samestep.loader(torch.utils.data.TensorDataset(torch.randn(400, 8)), 8):
    model(x).square().mean().backward()
"""

_SWEEP = """
import time, torch, samestep
net = torch.nn.Linear(8, 8)
train = samestep.loader(torch.utils.data.TensorDataset(torch.ones(40, 8)), 8)
model = samestep.replicate(net)
run = samestep.Checkpoint("ck", every=1, model=net, train=train)
run.resume()
for epoch in train.epochs(4):
    for x, in train:
        model(x).square().mean().backward()
        time.sleep(0.2)
        run.step()
print("ended")
"""

_AGAIN = """
import os, signal, sys, time
restarts = os.environ.get("SLURM_RESTART_COUNT", "0")
print(f"restart {restarts}, rank {os.environ['SLURM_PROCID']}", flush=True)
if restarts == "0":
    # The first to leave makes srun stop the others, which have as good a reason to leave.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(0.4 * int(os.environ["SLURM_PROCID"]))
    sys.exit(75)
"""


def _submit(cluster: Cluster, folder: Path, code: str, *words: str) -> str:
    (folder / "train.py").write_text(code)
    samestep = str(Path(sys.executable).with_name("samestep"))
    said = cluster.run(samestep, "submit", *words[:-1], "train.py", *words[-1].split("\n"), cwd=folder)
    found = re.search(r"^job (\d+); follow it with `tail -F (.*)`$", said, re.MULTILINE)
    assert found, said
    return found[1]


def _reports(folder: Path) -> dict[str, Any]:
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


@pytest.mark.parametrize("chosen", [("--partition", "main"), ()], ids=["named", "default"])
def test_more_nodes_than_the_partition_has_are_refused_before_the_queue(
    cluster: Cluster, tmp_path: Path, chosen: tuple[str, ...]
) -> None:
    (tmp_path / "train.py").touch()
    samestep = str(Path(sys.executable).with_name("samestep"))
    words = ("submit", "--profile", "cpu-node", *chosen, "--nodes", "5", "train.py")
    command = cluster.command(samestep, *words, cwd=tmp_path)
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "samestep submit: nodes 5 is more than the 4 of partition main; use at most 4\n"
    assert not (tmp_path / "runs").exists()


def test_every_process_gets_the_given_words_its_cores_and_its_devices(
    cluster: Cluster, tmp_path: Path
) -> None:
    words = ("--profile", "idris-v100", "--nodes", "2", "--account", "abc@v100", "--qos", "qos_gpu-t3")
    job = _submit(cluster, tmp_path, _REPORT, *words, "--env", f"GIVEN={_NASTY[1]}", "\n".join(_NASTY))
    cluster.wait_state(job, "COMPLETED")
    reports = _reports(tmp_path)
    assert list(reports) == [f"train--{rank}" for rank in range(8)]
    for rank, report in enumerate(reports.values()):
        assert report["argv"][1:] == list(_NASTY)
        env = report["env"]
        assert (env["SLURM_NTASKS"], env["SLURM_LOCALID"]) == ("8", str(rank % 4))
        assert (env["SLURM_CPUS_PER_TASK"], env["OMP_NUM_THREADS"]) == ("10", "10")
        assert env["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
        assert env["GIVEN"] == _NASTY[1]
        assert env["SLURMD_NODENAME"] in NODES
    log = (tmp_path / "runs" / f"train_{job}.out").read_text()
    told = sorted(line for line in log.splitlines() if line.startswith("rank"))
    assert told == [f"rank {rank} was here" for rank in range(8)]
    assert not (tmp_path / "canary").exists()


@pytest.mark.slow
def test_exit_code_75_requeues_the_job_which_goes_on_in_the_same_log(
    cluster: Cluster, tmp_path: Path
) -> None:
    job = _submit(cluster, tmp_path, _AGAIN, "--profile", "cpu-node", "--tasks-per-node", "3", "")
    cluster.wait_state(job, "COMPLETED")
    assert cluster.field(job, "Restarts") == "1"
    log = (tmp_path / "runs" / f"train_{job}.out").read_text()
    told = sorted(line for line in log.splitlines() if line.startswith("restart"))
    assert told == [f"restart {restart}, rank {rank}" for restart in (0, 1) for rank in range(3)]


def test_a_job_that_may_not_be_requeued_says_how_to_go_on(cluster: Cluster, tmp_path: Path) -> None:
    words = ("--profile", "cpu-node", "--tasks-per-node", "1", "--no-requeue", "")
    job = _submit(cluster, tmp_path, _AGAIN, *words)
    with pytest.raises(RuntimeError, match="is FAILED"):
        cluster.wait_state(job, "COMPLETED")
    assert cluster.field(job, "ExitCode") == "75:0"
    log = (tmp_path / "runs" / f"train_{job}.out").read_text()
    assert "stopped after a commit; submit this script again to go on\n" in log


def test_a_failure_ends_the_job_with_its_own_exit_code(cluster: Cluster, tmp_path: Path) -> None:
    # of several tasks, srun may stop one that still starts, and then gives 143
    job = _submit(
        cluster, tmp_path, "raise SystemExit(3)", "--profile", "cpu-node", "--tasks-per-node", "1", ""
    )
    with pytest.raises(RuntimeError, match="is FAILED"):
        cluster.wait_state(job, "COMPLETED")
    assert cluster.field(job, "ExitCode") == "3:0"


def test_each_element_of_an_array_has_its_own_output(cluster: Cluster, tmp_path: Path) -> None:
    job = _submit(cluster, tmp_path, _REPORT, "--profile", "one-gpu", "--array", "1-3", "x")
    for element in (1, 2, 3):
        cluster.wait_state(f"{job}_{element}", "COMPLETED")
        assert (tmp_path / "runs" / f"train_{job}_{element}.out").read_text() == "rank 0 was here\n"
    assert list(_reports(tmp_path)) == ["train-1-0", "train-2-0", "train-3-0"]


@pytest.mark.slow
def test_torchrun_starts_each_nodes_processes(cluster: Cluster, tmp_path: Path) -> None:
    # One write: torchrun's Pythons are unbuffered, and all write to one file.
    code = (
        "import os; os.write(1, '{RANK} {WORLD_SIZE} {OMP_NUM_THREADS}\\n'.format_map(os.environ).encode())"
    )
    words = ("--profile", "cpu-node", "--nodes", "2", "--tasks-per-node", "2", "--launcher", "torchrun", "")
    job = _submit(cluster, tmp_path, code, *words)
    cluster.wait_state(job, "COMPLETED", timeout=50)
    log = (tmp_path / "runs" / f"train_{job}.out").read_text()
    assert {f"{rank} 4 16" for rank in range(4)} <= set(log.splitlines())


_ENDS = """
import sys, time
import samestep
world = samestep.init()
if "fail" in sys.argv and world.rank == 1:
    raise FileNotFoundError("/data/volume-7.bin")
time.sleep(60)
"""


@pytest.mark.slow
def test_a_launcher_of_ours_on_each_node_reports_a_failure_and_keeps_every_ranks_log(
    isolated: Cluster, tmp_path: Path
) -> None:
    words = (
        "--profile=cpu-node",
        "--nodes=2",
        "--tasks-per-node=2",
        "--cpus-per-task=1",
        "--launcher=samestep",
    )
    job = _submit(isolated, tmp_path, _ENDS, *words, "fail")
    isolated.wait_state(job, "FAILED", timeout=60)
    log = (tmp_path / "runs" / f"train_{job}.out").read_text()
    assert re.search(
        rf"^train.py failed on rank 1 of 4 \(({'|'.join(NODES)}), cpu\) after ", log, re.MULTILINE
    ), log
    assert 'train.py:6 in <module>\n    raise FileNotFoundError("/data/volume-7.bin")\n' in log
    assert sorted(path.name for path in tmp_path.glob("runs/*/logs/rank-*.log")) == [
        f"rank-{k}.log" for k in range(4)
    ]


_COMMITS = """
import time, torch
import samestep
train = samestep.loader(torch.utils.data.TensorDataset(torch.ones(64, 4)), 2)
model = samestep.replicate(torch.nn.Linear(4, 1))
checkpoint = samestep.Checkpoint("commits", model=model, train=train)
for epoch in train.epochs(9):
    for (x,) in train:
        model(x).mean().backward()
        time.sleep(0.1)
        checkpoint.step()
"""


def _listed_after_scancel(
    cluster: Cluster, tmp_path: Path, script: str, sign: str
) -> tuple[str, dict[str, Any]]:
    """The job that was cancelled once its run had this file of a pulse, and how `samestep runs` lists it."""
    job = _submit(cluster, tmp_path, script, "--profile=cpu-node", "--tasks-per-node=1", "")
    until = time.monotonic() + 30
    while not (tmp_path / "runs" / f"train_{job}" / "pulse" / sign).exists():
        assert time.monotonic() < until
        time.sleep(0.2)
    cluster.run("scancel", job)
    cluster.wait_state(job, "CANCELLED")
    samestep = str(Path(sys.executable).with_name("samestep"))
    [run] = json.loads(cluster.run(samestep, "runs", "--json", cwd=tmp_path))["runs"]
    return job, run


@pytest.mark.slow
def test_a_job_that_was_cancelled_after_a_commit_is_not_listed_as_done(
    cluster: Cluster, tmp_path: Path
) -> None:
    _, run = _listed_after_scancel(cluster, tmp_path, _COMMITS, "steps-0")
    assert (run["state"], run["exit_code"]) == ("stopped at a checkpoint", 75)


@pytest.mark.slow
def test_a_job_that_was_cancelled_is_listed_as_cancelled(cluster: Cluster, tmp_path: Path) -> None:
    job, run = _listed_after_scancel(cluster, tmp_path, _ENDS, "rank-0")
    assert (run["run"].rpartition("/")[2], run["state"]) == (f"train_{job}", "cancelled")
    # of a rank that srun's daemon has killed and waited for, only a guess can be recorded
    pulse = read_pulse(pulse_path(tmp_path / run["run"], 0))
    assert pulse is not None
    guess = {"exception": "killed by SIGKILL, most likely: its process ended", "code": 137, "pid": pulse.pid}
    guess |= {"group": "", "cause": "", "frames": []}
    failure_path(tmp_path / run["run"], 0).write_text(json.dumps(guess))
    samestep = str(Path(sys.executable).with_name("samestep"))
    [run] = json.loads(cluster.run(samestep, "runs", "--json", cwd=tmp_path))["runs"]
    assert (run["state"], run["failure"]) == ("cancelled", None)


@pytest.mark.parametrize(
    ("script", "more", "code"),
    [("import no_such_module", (), 1), ("", ("--setup", "sh -c 'exit 5'"), 5), ("", (), 0)],
)
def test_a_job_that_never_called_init_is_listed_with_its_end(
    cluster: Cluster, tmp_path: Path, script: str, more: tuple[str, ...], code: int
) -> None:
    job = _submit(cluster, tmp_path, script, "--profile=cpu-node", "--tasks-per-node=2", *more, "")
    cluster.wait_state(job, "FAILED" if code else "COMPLETED")
    samestep = str(Path(sys.executable).with_name("samestep"))
    [run] = json.loads(cluster.run(samestep, "runs", "--json", cwd=tmp_path))["runs"]
    assert run["state"] == (f"failed ({code})" if code else "done")
    assert (run["exit_code"], run["ranks"], run["command"].rstrip()) == (code, 2, "train.py")
    assert 0 <= run["seconds"] < 60


def test_sbatch_reads_every_value_as_it_was_written(cluster: Cluster, tmp_path: Path) -> None:
    for name in (" ".join(_NASTY), " ".join(reversed(_NASTY))):
        words = ("--profile", "cpu-node", "--option=--hold", "--name", name, f"--option=--comment={name}", "")
        job = _submit(cluster, tmp_path, "", *words)
        shown = cluster.run("scontrol", "show", "job", job)
        assert f"JobName={name}\n" in shown
        assert f"Comment={name} \n" in shown
    assert not (tmp_path / "canary").exists()


def test_what_sbatch_refuses_is_told_in_its_own_words(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    samestep = str(Path(sys.executable).with_name("samestep"))
    words = cluster.command(samestep, "submit", "--partition", "none", "train.py", cwd=tmp_path)
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 2
    assert "sbatch refused runs/train-" in done.stderr
    assert "invalid partition specified: none" in done.stderr


@pytest.mark.slow
def test_a_step_that_srun_starts_keeps_its_run_with_a_log_for_each_rank(
    cluster: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(
        "import os, sys, samestep\n"
        "rank = samestep.init().rank\n"
        "print('out', rank, flush=True)\n"
        "os.system(f'echo child {rank} >&2')\n"
        "samestep.sum(1)\n"
        "print('last', rank, file=sys.stderr)\n"
        "os._exit(5) if rank == 1 and sys.argv[1:] else None\n"
    )
    shown = cluster.run("srun", "-N2", "-n3", sys.executable, "train.py", cwd=tmp_path)
    assert sorted(shown.splitlines()) == ["out 0", "out 1", "out 2"]
    (run,) = (tmp_path / "runs").iterdir()
    logs = [(run / "logs" / f"rank-{rank}.log").read_text().splitlines() for rank in range(3)]
    assert [sorted(log) for log in logs] == [
        [f"child {rank}", f"last {rank}", f"out {rank}"] for rank in range(3)
    ]
    samestep = str(Path(sys.executable).with_name("samestep"))
    [told] = json.loads(cluster.run(samestep, "runs", "--json", cwd=tmp_path))["runs"]
    assert (told["state"], told["ranks"]) == ("done", 3)
    command = cluster.command("srun", "-n2", sys.executable, "train.py", "exit", cwd=tmp_path)
    assert subprocess.run(command, capture_output=True).returncode == 5
    told = json.loads(cluster.run(samestep, "runs", "--json", cwd=tmp_path))["runs"][0]
    assert "failed" in told["state"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "end", ["sys.exit(7)", "sys.exit(7) if rank == 1 else samestep.sum(1)"], ids=["all", "one"]
)
def test_a_ranks_own_exit_code_is_the_steps_also_where_srun_kills_the_others(
    cluster: Cluster, tmp_path: Path, end: str
) -> None:
    (tmp_path / "train.py").write_text(
        f"import sys, samestep\nrank = samestep.init().rank\nsamestep.sum(1)\n{end}\n"
    )
    command = cluster.command("srun", "--kill-on-bad-exit=1", "-N2", sys.executable, "train.py", cwd=tmp_path)
    assert subprocess.run(command, capture_output=True).returncode == 7


@pytest.mark.slow
def test_one_element_of_an_array_has_the_directory_of_checkpoints_and_a_later_one_says_whose_it_is(
    cluster: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(_SWEEP)
    array = "#!/bin/bash\n#SBATCH -n1 -o %a.txt\n"
    said = {}
    for elements in ("1-4", "9"):
        (tmp_path / "job.sh").write_text(array + f"srun {sys.executable} train.py 2>&1\n")
        job = cluster.run("sbatch", "--parsable", f"--array={elements}", "job.sh", cwd=tmp_path).strip()
        while cluster.run("squeue", "-h", "-j", job, cwd=tmp_path).strip():
            time.sleep(0.2)
        said |= {path.stem: path.read_text() for path in tmp_path.glob("*.txt")}
    refused = [text for text in said.values() if "ended" not in text]
    assert len(said) == 5
    assert len(refused) < 4
    remedy = "Checkpoint('ck-' + os.environ['SLURM_ARRAY_TASK_ID'], ...)"
    assert all("ck is held by another run (job " in text and remedy in text for text in refused)
    assert re.search(
        r", which element [1-4] of a job array committed; if the elements train different", said["9"]
    )


@pytest.mark.slow
def test_a_job_goes_on_without_a_node_that_lost_its_power(isolated: Cluster, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, time\n"
        "again, size = os.environ['TORCHELASTIC_RESTART_COUNT'], os.environ['WORLD_SIZE']\n"
        "open(f'up{again}-{size}', 'a').write(os.environ['RANK'])\n"
        "while again == '0':\n"
        "    time.sleep(0.01)\n"
    )
    step = "srun --no-kill --kill-on-bad-exit=0 --ntasks-per-node=1"
    run = f"{sys.executable} -m samestep run -n 1 --nodes 1:2 --max-restarts 1 --no-fork train.py"
    (tmp_path / "job.sh").write_text(f"#!/bin/bash\n{step} {run}\n")
    job = isolated.submit("--no-kill", "--nodes=2", "--output=out", "job.sh", cwd=tmp_path)
    isolated.wait_state(job, "RUNNING")
    until = time.monotonic() + 30
    while not (tmp_path / "up0-2").exists() or len((tmp_path / "up0-2").read_text()) < 2:
        assert time.monotonic() < until
        time.sleep(0.05)
    names = isolated.run("scontrol", "show", "hostnames", isolated.field(job, "NodeList")).split()
    isolated.kill_node(names[-1])
    isolated.wait_state(job, "COMPLETED", timeout=50)
    assert (tmp_path / "up1-1").read_text() == "0"
    said = (tmp_path / "out").read_text()
    assert re.search(r"node 1 \(.*\) was lost: .*: restart 1 of 1\nsamestep: going on with 1 node", said)


@pytest.mark.slow
def test_a_job_measures_a_script_in_steps_of_its_allocation(cluster: Cluster, tmp_path: Path) -> None:
    job = _submit(
        cluster, tmp_path, _STEPS, "--profile=laptop", "--nodes=2", "--tasks-per-node=2",
        "--scale=-n 2 --vary nodes=2 --repeat 1 --steps 12 --json", "--lr\n1",
    )  # fmt: skip
    cluster.wait_state(job, "COMPLETED", timeout=50)
    said = (tmp_path / f"runs/train_{job}.out").read_text()
    document = json.loads(said[said.index("{") :])
    assert document["script"] == ["train.py", "--lr", "1"]
    assert [(row["processes"], row["settings"]) for row in document["rows"]] == [(2, {"nodes": "2"})]
