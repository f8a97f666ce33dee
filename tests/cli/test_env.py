import json
import os
import shutil
import subprocess
import sys

import pytest

SAMESTEP = [sys.executable, "-m", "samestep"]
BARE = {
    name: os.environ[name]
    for name in ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH", "TMPDIR")
    if name in os.environ
}
TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}


def ask(*options, **env):
    asked = [*SAMESTEP, "env", *options]
    return subprocess.run(asked, env=BARE | env, capture_output=True, text=True, check=False)


def test_one_line_says_who_this_process_is():
    said = ask(**TORCHRUN)
    assert (
        said.stdout
        == "rank 1 of 2, local rank 1 of 2, node 0 of 1, started by torchrun, meeting at 127.0.0.1:29500\n"
    )
    assert (said.returncode, said.stderr) == (0, "")


def test_explain_names_the_variable_of_each_value():
    lines = ask("--explain", **TORCHRUN).stdout.splitlines()[2:]
    assert [line.split(maxsplit=2) for line in lines] == [
        ["rank", "1", "RANK=1"],
        ["size", "2", "WORLD_SIZE=2"],
        ["local_rank", "1", "LOCAL_RANK=1"],
        ["local_size", "2", "LOCAL_WORLD_SIZE=2"],
        ["node", "0", "computed from local_size"],
        ["nodes", "1", "computed from local_size"],
        ["master_addr", "127.0.0.1", "MASTER_ADDR=127.0.0.1"],
        ["master_port", "29500", "MASTER_PORT=29500"],
    ]


def test_json_has_every_fact_under_a_schema_version():
    said = json.loads(ask("--json").stdout)
    assert said.pop("origin").keys() == {"rank", "size", "local_rank", "local_size", "node", "nodes"}
    assert said == {
        "schema_version": 1,
        "rank": 0,
        "size": 1,
        "local_rank": 0,
        "local_size": 1,
        "node": 0,
        "nodes": 1,
        "launcher": "alone",
        "master_addr": None,
        "master_port": None,
        "notes": [],
        "run": None,
    }


@pytest.mark.parametrize("options", [(), ("--explain",), ("--json",)])
def test_notes_go_to_stderr_and_data_to_stdout(options):
    said = ask(*options, SLURM_JOB_ID="7", SLURM_NTASKS="4")
    assert said.stderr == (
        "note: this process runs alone in Slurm job 7; `srun python ...` starts one for each task, "
        "and `samestep run ...` one for each device\n"
    )
    assert "note:" not in said.stdout


def test_a_contradiction_is_one_sentence_and_exit_code_2():
    said = ask(WORLD_SIZE="4")
    assert said.returncode == 2
    assert said.stdout == ""
    assert said.stderr == (
        "samestep env: WORLD_SIZE is 4 but RANK is not set; start this with `samestep run` or set both\n"
    )


def test_torch_is_not_needed_to_answer():
    told = (
        "import sys; from samestep.cli.env import command; "
        "command([], standalone_mode=False); print(*sys.modules)"
    )
    assert "torch" not in subprocess.check_output([sys.executable, "-c", told], env=BARE, text=True).split()


OPEN_MPI = ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe"]
MPICH = ["mpirun.mpich"]


def start_under(mpirun, size, directory, *, within=()):
    """A directory for each run: Open MPI's runs trip over each other where both make its one in /tmp."""
    if shutil.which(mpirun[0]) is None:
        if os.environ.get("CI") == "true":
            pytest.fail(f"{mpirun[0]} is not installed; install openmpi-bin and mpich")
        pytest.skip(f"{mpirun[0]} is not installed")
    command = [*mpirun, "-n", str(size), *within, *SAMESTEP, "env", "--json"]
    return subprocess.Popen(
        command,
        env=BARE | {"TMPDIR": str(directory)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def answers(process):
    said, complaints = process.communicate()
    assert process.returncode == 0, complaints
    return sorted(map(json.loads, said.splitlines()), key=lambda p: p["rank"])


@pytest.mark.mpi
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(("mpirun", "launcher"), [(OPEN_MPI, "openmpi"), (MPICH, "mpich")])
def test_mpirun_places_every_process_and_gives_them_one_port(mpirun, launcher, size, tmp_path):
    placed = answers(start_under(mpirun, size, tmp_path))
    assert [p["rank"] for p in placed] == [p["local_rank"] for p in placed] == list(range(size))
    assert {(p["size"], p["local_size"], p["node"], p["nodes"]) for p in placed} == {(size, size, 0, 1)}
    assert {(p["launcher"], p["master_addr"]) for p in placed} == {(launcher, "127.0.0.1")}
    assert len({p["master_port"] for p in placed}) == 1
    # Open MPI binds up to two processes to a core each; that is noted where more cores are idle
    is_noted = launcher == "openmpi" and size <= 2 and size < len(os.sched_getaffinity(0))
    noted = [["lets this process use 1 of" in note for note in p["notes"]] for p in placed]
    assert noted == [[True] if is_noted else []] * size


@pytest.mark.mpi
@pytest.mark.parametrize("mpirun", [OPEN_MPI, MPICH], ids=["openmpi", "mpich"])
def test_two_mpiruns_at_once_do_not_meet(mpirun, tmp_path):
    directories = [tmp_path / "1", tmp_path / "2"]
    for directory in directories:
        directory.mkdir()
    runs = [start_under(mpirun, 2, directory) for directory in directories]
    ports, other_ports = ({p["origin"]["master_port"] for p in answers(run)} for run in runs)
    assert len(ports) == len(other_ports) == 1
    assert ports != other_ports


@pytest.mark.mpi
def test_a_shell_between_mpirun_and_the_script_changes_nothing(tmp_path):
    placed = answers(start_under(MPICH, 3, tmp_path, within=["sh", "-c", '"$0" "$@"; exit $?']))
    assert [p["rank"] for p in placed] == [0, 1, 2]
    assert len({p["master_port"] for p in placed}) == 1


@pytest.mark.slow
@pytest.mark.mpi
def test_rank_0_prints_where_all_ranks_are(tmp_path):
    for option in ("--all", "--json"):
        command = [*OPEN_MPI, "-n", "2", *SAMESTEP, "env", "--all", option]
        env = BARE | {"TMPDIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": "", "NCCL_ALGO": "Ring"}
        said = subprocess.run(command, env=env, capture_output=True, text=True, timeout=50)
        assert said.returncode == 0, said.stderr
        host, cores = os.uname().nodename, len(os.sched_getaffinity(0))
        if option == "--json":
            found = json.loads(said.stdout)
            assert [(row["rank"], row["host"], row["backend"]) for row in found["ranks"]] == [
                (rank, host, "gloo") for rank in (0, 1)
            ]
            assert found["settings"]["NCCL_ALGO"] == "Ring"
            continue
        heads, *ranks = said.stdout.splitlines()
        assert heads.split() == ["rank", "node", "host", "device", "cores", "backend", "interface", "address"]
        assert [line.split()[:4] for line in ranks[:2]] == [[str(rank), "0", host, "cpu"] for rank in (0, 1)]
        assert all(1 <= int(line.split()[4]) <= cores for line in ranks[:2])
        assert "NCCL_ALGO=Ring" in ranks
