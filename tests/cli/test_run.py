"""What `samestep run` understands, and what it says to what cannot be."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from samestep.cli.run import command

CLEAN = {
    name: value for name, value in os.environ.items() if not name.startswith(("SAMESTEP", "OMP", "CUDA"))
}


def run(home: Path, *args: str, **env: str) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "samestep", "run", *args]
    done = subprocess.run(command, cwd=home, env=CLEAN | env, capture_output=True, text=True, timeout=50)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "show.py").write_text(
        "import os, sys\nprint(os.environ['RANK'], os.environ['WORLD_SIZE'], *sys.argv[1:])\n"
    )
    return tmp_path


def test_everything_after_the_script_belongs_to_it(home):
    assert run(home, "-n", "2", "show.py", "-n", "7", "--tee", "--", "-m")[1] == "0 2 -n 7 --tee -- -m\n"
    assert run(home, "-n", "2", "--", "show.py", "--help")[1] == "0 2 --help\n"


@pytest.mark.parametrize(
    "args",
    [
        ["--nproc-per-node", "2"],
        ["--nproc_per_node=2", "--standalone"],
        ["--nproc_per_node=2", "--standalone", "--nnodes=1", "--rdzv-endpoint=node01:29400"],
        ["--nproc_per_node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"],
        ["--nproc_per_node=2", "--nnodes=1", "--rdzv-backend=c10d", "--rdzv-endpoint=node01:29400"],
        ["--nproc-per-node=2", "--nnodes=1", "--node_rank=0"],
        [
            "--nproc-per-node=2",
            "--nnodes=1:1",
            "--rdzv-backend=c10d",
            "--rdzv_endpoint=localhost:0",
            "--rdzv-id=7",
        ],
        ["-n2", "--master-addr=localhost", "--master_port=29511"],
        ["-n2", "--nnodes=1", "--node-rank=0", "--master-addr=localhost", "--master_port=29511"],
        ["-n2", "--node-rank=0"],
        ["-n2", "--signals-to-handle=SIGTERM,SIGALRM", "--shutdown-timeout=3", "--max-restarts=0"],
        ["-n2", "-r", "0", "-t", "0"],
        ["-n2", "--run-path", "--event_log_handler=null", "--monitor-interval=0.1", "--role=trainer"],
    ],
)
def test_torchruns_spellings_of_one_node_are_understood(home, args):
    assert run(home, *args, "show.py") == (0, "0 2\n", "")


def test_an_option_may_come_from_torchruns_variable_and_the_command_line_goes_before_it(home):
    assert run(home, "show.py", PET_NPROC_PER_NODE="2") == (0, "0 2\n", "")
    assert run(home, "-n3", "show.py", PET_NPROC_PER_NODE="2") == (0, "0 3\n", "")
    code, _, err = run(home, "-n2", "show.py", PET_NNODES="2", PET_NODE_RANK="2")
    assert (code, err.split(";")[0]) == (2, "samestep: --node-rank 2 does not fit --nodes 2")


def test_every_option_of_torchrun_is_known():
    theirs = {name for action in get_args_parser()._actions for name in action.option_strings}
    ours = {name for option in command.params for name in option.opts} | set(
        command.context_settings["help_option_names"]
    )
    assert theirs
    assert {name.replace("_", "-") for name in theirs} <= ours


def test_the_output_of_chosen_ranks_is_shown(home):
    assert run(home, "-n3", "--tee", "2", "show.py")[0] == 2
    assert run(home, "-n3", "--tee", "0,2", "show.py")[1].splitlines() in (
        ["0 3", "[rank 2] 2 3"],
        ["[rank 2] 2 3", "0 3"],
    )
    assert run(home, "-n3", "--local-ranks-filter=1", "--all-ranks", "show.py")[1] == "[rank 1] 1 3\n"
    assert run(home, "-n2", "-r", "3", "show.py")[1] == ""


def test_without_devices_one_process_is_started_and_a_line_says_how_to_ask_for_more(home):
    code, out, err = run(home, "show.py", CUDA_VISIBLE_DEVICES="")
    assert (code, out) == (0, "0 1\n")
    said = (
        "no device is visible, so this is 1 process; for two on this machine's cores: samestep run -n 2 ..."
    )
    assert err == f"{said}\n"


def test_an_option_of_ours_behind_a_script_that_reads_no_arguments_is_said(home):
    script = home / "plain.py"
    script.write_text("print(1)\n")
    said = (
        "samestep: -n is given to plain.py, which seems to read no arguments; write options of samestep run before "
        "it: samestep run -n 2 plain.py\n"
    )
    assert run(home, "-n1", "plain.py", "-n", "2") == (0, "1\n", said)
    assert run(home, "-n1", "plain.py", "--epochs", "2") == (0, "1\n", "")
    script.write_text("import sys\nprint(sys.argv[1])\n")
    assert run(home, "-n1", "plain.py", "-n", "2") == (0, "-n\n", "")
    script.write_text("import argparse\nargparse.ArgumentParser().parse_args()\n")
    said = "samestep: --same is given to plain.py, which may know no such option; write options of samestep run before "
    assert run(home, "-n1", "plain.py", "--same")[2].endswith(f"{said}it: samestep run --same ... plain.py\n")
    assert said not in run(home, "-n1", "plain.py", "--lr")[2]


def test_a_notebook_is_refused_with_the_command_that_exports_it(home):
    (home / "book.ipynb").write_text("{}")
    code, _, err = run(home, "book.ipynb")
    assert (code, "export it (jupyter nbconvert --to script book.ipynb), or" in err) == (2, True)


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["-n", "0", "show.py"], 2, "-n 0 is not a number of processes; write 1 to 9999"),
        (["-n", "two", "show.py"], 2, "-n two is not a number of processes"),
        (
            ["-np", "2", "show.py"],
            2,
            "-n p is not a number of processes; write 1 to 9999, as -n 2 for mpirun's -np 2",
        ),
        (["-n", "gpu", "show.py"], 2, "-n gpu asks for a process on each device, but none is visible"),
        (["--devices", "0", "show.py"], 2, "names devices, but none is visible here"),
        (["--nnodes", "2", "show.py"], 2, "--nodes 2 does not say where the nodes meet; add --rendezvous"),
        (["--nodes=4:1", "show.py"], 2, "--nodes 4:1 is not a number of nodes"),
        (["--nodes=1:4", "show.py"], 2, "--nodes 1:4 does not say where the nodes meet"),
        (
            ["--nodes=2", "--node-rank=2", "show.py"],
            2,
            "--node-rank 2 does not fit --nodes 2; count from 0 to 1",
        ),
        (
            ["-n2", "--node-rank=1", "--rendezvous=tcp://127.0.0.1:29777", "show.py"],
            2,
            "--node-rank 1 needs --nodes; add --nodes and the number of nodes, or leave --node-rank out",
        ),
        (["-n2", "--node-rank=1", "--master-addr=node01", "show.py"], 2, "or leave --node-rank out"),
        (
            ["-n2", "--node-rank=0", "--rendezvous=tcp://127.0.0.1:29777", "show.py"],
            2,
            "--rendezvous tcp://127.0.0.1:29777 needs --nodes",
        ),
        (["-n2", "--rendezvous=file:///x", "show.py"], 2, "or leave --rendezvous out"),
        (["-n2", "--nodes=1", "--node-rank=1", "show.py"], 2, "--node-rank 1 does not fit --nodes 1"),
        (
            ["--standalone", "--nodes=2", "show.py"],
            2,
            "--standalone means one node; leave it out, or --nodes",
        ),
        (
            ["--standalone", "--node-rank=1", "show.py"],
            2,
            "--standalone means one node; leave it out, or --nodes",
        ),
        (["--nodes=2", "--rendezvous=file:///x", "show.py"], 2, "add --node-rank"),
        (
            ["-n2", "--nodes=2", "--node-rank=1", "--rendezvous=tcp://no.such.invalid:1", "show.py"],
            2,
            "; write --nodes 2 --rendezvous tcp://HOST:1 with an address of no.such.invalid\n",
        ),
        (["--nodes=2", "--rendezvous=ftp://x", "show.py"], 2, "--rendezvous ftp://x is not a meeting point"),
        (["-n", "2,1", "--nodes=2", "--rdzv-endpoint=x:1", "show.py"], 2, "none of them for node -1"),
        (["-n2", "--tee", "5", "show.py"], 2, "--tee 5 names rank 5, but there are 2; count from 0"),
        (["-n2", "--tee", "1", "show.py"], 2, "--tee 1 shows a part of a rank's output"),
        (["-n2", "-r", "1", "show.py"], 2, "files keep all, so leave -r out"),
        (["-n2", "--restart-on", "75", "show.py"], 2, "--restart-on has no effect without --max-restarts"),
        (["-n2", "--restart-on", "x", "--max-restarts", "1", "show.py"], 2, "is not a list of exit codes"),
        (["-n2", "--signals-to-handle", "SIGNOPE", "show.py"], 2, "is not a signal that can be passed on"),
        (["-n2", "--numa-binding", "node", "show.py"], 2, "--numa-binding is not offered"),
        (["--num_processes", "2", "show.py"], 2, "--num-processes is -n here; write -n 2"),
        (["--gpus=4", "show.py"], 2, "--gpus is -n here; write -n 4"),
        (["--ntasks", "4", "show.py"], 2, "--ntasks is -n here; write -n 4"),
        (
            ["--mixed-precision=fp16", "show.py"],
            2,
            "--mixed-precision is not offered: the script says it, as with",
        ),
        (["--cpu", "-n2", "show.py"], 2, "--cpu is not offered: the script's device decides"),
        (["-n2", "."], 2, ". is a directory without a __main__.py; write the path of a script in it"),
        (["-n2"], 2, "missing argument 'SCRIPT'; write for instance `samestep run -n 2 train.py --epochs 3`"),
        (["--num-machines=4", "show.py"], 2, "--num-machines is --nodes here; write --nodes 4"),
        (
            ["-n2", "--virtual-local-rank", "show.py"],
            2,
            "--virtual-local-rank is not offered: every process is",
        ),
        (
            ["-n2", "--logs_specs=mine", "show.py"],
            2,
            "--logs-specs is not offered: every rank's output is kept",
        ),
        (["-n2", "--duplicate-stderr-filters=x", "show.py"], 2, "--duplicate-stderr-filters is not offered"),
        (["-n2", "--no-python", "-m", "show"], 2, "leave one of them out"),
        (["-n2", "--run-dir", "show.py/runs", "show.py"], 2, "cannot be written (not a directory)"),
        (["-n2", "nowhere.py"], 127, "there is no script 'nowhere.py' in /"),
        (
            ["-n2", "--no-python", "nowhere-to-be-found"],
            127,
            "cannot be executed (no such file or directory)",
        ),
        (["-n2", "--no-python", "./show.py"], 126, "./show.py cannot be executed (permission denied)"),
    ],
)
def test_what_cannot_be_is_one_sentence(home, args, code, says):
    found, out, err = run(home, *args, CUDA_VISIBLE_DEVICES="")
    assert (found, out) == (code, "")
    assert err.startswith("samestep: ")
    assert says in err
    assert err.count("\n") == 1
    assert not (home / "runs").exists()


def test_a_directory_is_named_as_it_is_written(home):
    (home / "Runs").mkdir()
    assert f" in {home}/Runs; write its path\n" in run(home / "Runs", "-n2", "nowhere.py")[2]


@pytest.mark.parametrize(
    ("command", "code"),
    [("run", 127), ("submit", 2), ("scale", 2), ("profile", 2), ("convert", 2), ("verify", 2)],
)
def test_every_command_says_of_a_script_that_is_not_there_the_same(command, code, tmp_path):
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "train.py").touch()
    for script, wanted in (("no.py", "its path"), ("pkg.train", "-m pkg.train")):
        done = subprocess.run(
            [sys.executable, "-m", "samestep", command, script], cwd=tmp_path, capture_output=True, text=True
        )
        said = f": there is no script '{script}' in {tmp_path}; write {wanted}\n"
        assert (done.returncode, done.stderr.removeprefix("samestep").removeprefix(f" {command}")) == (
            code,
            said,
        )
    assert [path.name for path in tmp_path.iterdir()] == ["pkg"]


@pytest.mark.parametrize(
    ("place", "script", "written"),
    [
        (".", ["src/cells/train.py"], "PYTHONPATH=src samestep run -n 1 -m cells.train"),
        ("src", ["cells/train.py"], "samestep run -n 1 -m cells.train"),
        ("src/cells", ["-m", "train"], "PYTHONPATH=.. samestep run -n 1 -m cells.train"),
    ],
)
@pytest.mark.parametrize("names", [["__init__.py"], []])
def test_a_file_of_a_package_is_told_to_be_started_as_a_module(place, script, written, names, tmp_path):
    if not names and place == ".":
        written = "samestep run -n 1 -m src.cells.train"  # where a package begins is not told
    folder = tmp_path / "src" / "cells"
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).touch()
    (folder / "data.py").write_text("print('read')\n")
    (folder / "train.py").write_text("from . import data\n")
    code, _, err = run(tmp_path / place, "-n1", *script)
    assert code == 1
    assert f" belongs to a package; write `{written}`\n" in err
    done = subprocess.run(
        written.replace("samestep", f"{sys.executable} -m samestep", 1),
        shell=True,
        cwd=tmp_path / place,
        env=CLEAN,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert (done.returncode, done.stdout) == (0, "read\n"), done.stderr


def test_a_directory_that_was_removed_is_said_to_be(home):
    (home / "gone").mkdir()
    enter = ["sh", "-c", 'cd gone && rmdir ../gone && exec "$@"', "sh"]
    done = subprocess.run(
        [*enter, sys.executable, "-m", "samestep", "run", "-n2", home / "show.py"],
        cwd=home,
        env=CLEAN,
        capture_output=True,
        text=True,
        timeout=50,
    )
    said = "samestep: the directory this was started in was removed; change to one that exists\n"
    assert (done.returncode, done.stderr) == (2, said)


@pytest.mark.parametrize("args", [[], ["--nope", "show.py"], ["--master-port", "0", "show.py"]])
def test_a_command_line_that_cannot_be_read_exits_2(home, args):
    code, _, err = run(home, *args)
    assert code == 2
    assert "Traceback" not in err


def test_a_module_and_a_program_are_run(home):
    assert run(home, "-n2", "-m", "show", "x")[1] == "0 2 x\n"
    assert run(home, "-n2", "--no-python", "sh", "-c", "echo $RANK of $WORLD_SIZE")[1] == "0 of 2\n"


def test_workers_get_threads_for_their_cores_unless_the_user_said_otherwise(home):
    (home / "threads.py").write_text("import os\nprint(os.environ['OMP_NUM_THREADS'])\n")
    cores = len(os.sched_getaffinity(0))
    assert int(run(home, "-n2", "threads.py")[1]) == max(1, cores // 2)
    assert run(home, "-n2", "threads.py", OMP_NUM_THREADS="7")[1] == "7\n"


def test_rank_0_reads_the_launchers_stdin(home):
    (home / "ask.py").write_text("print(input())\n")
    command = [sys.executable, "-m", "samestep", "run", "-n", "1", "ask.py"]
    done = subprocess.run(
        command, cwd=home, env=CLEAN, input="yes\n", capture_output=True, text=True, check=True
    )
    assert done.stdout == "yes\n"


def test_a_run_leaves_its_record_and_no_process(home):
    assert run(home, "-n2", "show.py")[0] == 0
    (newest,) = (home / "runs").iterdir()
    assert '"exit_code": 0' in (newest / "result.json").read_text()
    assert '"size": 2' in (newest / "run.json").read_text()
    assert not [path for path in Path("/proc").glob("[0-9]*/cwd") if _leads_to(path, home)]


def _leads_to(path: Path, home: Path) -> bool:
    try:
        return path.readlink() == home
    except OSError:
        return False


def test_help_shows_examples_and_imports_no_torch():
    command = [sys.executable, "-X", "importtime", "-m", "samestep", "run", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "samestep run -n 2 train.py --epochs 3" in done.stdout
    assert not [line for line in done.stderr.splitlines() if line.split("|")[-1].strip().startswith("torch")]


def test_same_is_told_to_the_workers(home):
    (home / "same.py").write_text("import os\nprint(os.environ.get('SAMESTEP_SAME'))\n")
    assert run(home, "-n2", "--same", "same.py")[1] == "1\n"
    assert run(home, "-n2", "same.py")[1] == "None\n"


def test_a_module_that_is_not_there_is_refused_before_any_process_starts(home):
    code, out, err = run(home, "-n2", "-m", "missing.train")
    assert (code, out) == (2, "")
    assert err.startswith(f"samestep: there is no module 'missing' in {home} or among the packages of ")
    assert not (home / "runs").exists()
    assert run(home, "-n2", "-m", "show") == (0, "0 2\n", "")
    (home / "package").mkdir()
    (home / "package" / "__init__.py").touch()
    code, _, err = run(home, "-n2", "-m", "package")
    assert (code, "package is a package without a __main__.py; write -m package.train" in err) == (2, True)
    (home / "package" / "__main__.py").write_text("print('main')")
    assert run(home, "-n1", "-m", "package") == (0, "main\n", "")


def test_more_than_two_processes_of_a_core_get_a_line_and_those_of_a_scheduler_do_not(home):
    (home / "show.py").write_text("")
    core = str(min(os.sched_getaffinity(0)))
    for size, env, says in (("3", {}, True), ("2", {}, False), ("3", {"PBS_JOBID": "7"}, False)):
        words = ["taskset", "-c", core, sys.executable, "-m", "samestep", "run", "-n", size, "show.py"]
        done = subprocess.run(words, cwd=home, env=CLEAN | env, capture_output=True, text=True, timeout=50)
        assert (done.returncode, "take turns on 1 core, so" in done.stderr) == (0, says), done.stderr


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_run_whose_output_is_lost_on_a_full_disk_says_so_and_fails_and_its_logs_are_complete(home, stream):
    (home / "show.py").write_text(
        "import os, sys\nprint('a')\nprint('b', file=sys.stderr)\nos.open('end', os.O_CREAT)"
    )
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with open("/dev/full", "wb", buffering=0) as streams[stream]:
        words = [sys.executable, "-m", "samestep", "run", "-n2", "show.py"]
        done = subprocess.run(words, cwd=home, env=CLEAN, **streams, text=True, timeout=50)
    assert (done.returncode, (home / "end").exists()) == (1, True)
    if stream == "stdout":
        assert "samestep: what was to be shown is lost (no space left on device); it is in " in done.stderr
    (log,) = home.glob("runs/*/logs/rank-0.log")
    assert sorted(log.read_text().split()) == ["a", "b"]
