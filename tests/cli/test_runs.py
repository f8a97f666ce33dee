"""The verbs that look at runs, on directories that real runs have left or are writing."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

TRAIN = """
import os, sys, time
from pathlib import Path
from samestep.rundir import Pulse, pulse_of, step_times_of
from samestep.steptimes import PARTS, StepTimes
rank = int(os.environ["RANK"])
pulse, times = Pulse(pulse_of(os.environ, rank)), StepTimes(step_times_of(os.environ, rank))
for step in range(int(sys.argv[1])):
    began = time.monotonic()
    pulse.beat(step, 1)
    print("step", step, "on", rank, flush=True)
    time.sleep(0.05)
    times.add(step, began, time.monotonic(), 1, 2, [0.05] * len(PARTS))
    if Path(os.environ["SAMESTEP_RUN"], "stop").exists():
        sys.exit(75)
sys.exit(int(sys.argv[2]))
"""


def samestep(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("SAMESTEP")}
    return subprocess.run(
        [sys.executable, "-m", "samestep", *words],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=30,
    )


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    (folder / "train.py").write_text(TRAIN)
    samestep(folder, "run", "-n", "2", "train.py", "3", "0")
    samestep(folder, "run", "-n", "1", "train.py", "1", "7")
    return folder


def test_runs_lists_what_was_run_the_newest_first(home):
    listed = json.loads(samestep(home, "runs", "--json").stdout)
    assert listed["schema_version"] == 1
    failed, done = listed["runs"][:2]
    assert (done["state"], done["ranks"], done["step"], done["exit_code"]) == ("done", 2, 2, 0)
    assert (failed["state"], failed["ranks"], failed["step"]) == ("failed (7)", 1, 0)
    assert done["command"] == "train.py 3 0"
    # three steps are the start-up, and this run took two
    assert done["steps_per_second"] is done["samples_per_second"] is None
    lines = samestep(home, "runs").stdout.splitlines()
    assert lines[0].split() == ["run", "state", "ranks", "step", "steps/s", "started", "took", "command"]
    assert lines[2].endswith("train.py 3 0")


@pytest.mark.parametrize("words", [("runs",), ("profiles",)])
def test_tables_fit_a_terminal_of_40_columns(home, monkeypatch, words):
    wide = samestep(home, *words).stdout.splitlines()
    monkeypatch.setenv("COLUMNS", "40")
    narrow = samestep(home, *words).stdout.splitlines()
    assert max(map(len, narrow)) <= 40 < max(map(len, wide))
    first = wide[0].split()[0]  # the heading of what begins each paragraph
    assert set(" ".join(wide).split()) - {first} <= set(" ".join(narrow).split())


@pytest.mark.parametrize("record", ["[1, 2]", "{}", '{"command": "main", "start_time": "2026-11-21"}'])
def test_what_other_programs_keep_in_runs_is_no_run(tmp_path, record):
    (tmp_path / "runs" / "1").mkdir(parents=True)
    (tmp_path / "runs" / "1" / "run.json").write_text(record)
    assert samestep(tmp_path, "runs").stdout == "no runs in runs\n"
    assert "there is no run in runs" in samestep(tmp_path, "status").stderr
    assert "there is no run in 1 or runs/1" in samestep(tmp_path, "logs", "1").stderr


def test_a_command_of_several_lines_is_one_line_of_the_list(tmp_path):
    samestep(tmp_path, "run", "-n", "1", "--no-python", "sh", "-c", "true\n\ttrue")
    rows = samestep(tmp_path, "runs").stdout.splitlines()
    assert len(rows) == 2
    assert rows[1].endswith("  sh -c true  true")


def test_no_runs_are_no_error(tmp_path):
    assert samestep(tmp_path, "runs").stdout == "no runs in runs\n"


def test_runs_names_the_reports_of_scale_which_keeps_no_runs(tmp_path):
    page = Path("runs", "scale-train-1a2b3c", "report.html")
    (tmp_path / page).parent.mkdir(parents=True)
    (tmp_path / page).touch()
    said = f"no runs in runs\nmeasured by samestep scale: {page}\n"
    assert samestep(tmp_path, "runs").stdout == said
    assert json.loads(samestep(tmp_path, "runs", "--json").stdout)["reports"] == [str(page)]


def test_logs_shows_one_rank_or_all(home):
    run = json.loads(samestep(home, "runs", "--json").stdout)["runs"][1]["run"]
    assert samestep(home, "logs", run).stdout == "step 0 on 0\nstep 1 on 0\nstep 2 on 0\n"
    assert samestep(home, "logs", "--rank", "1", run).stdout == "step 0 on 1\nstep 1 on 1\nstep 2 on 1\n"
    both = samestep(home, "logs", "--rank", "all", Path(run).name).stdout.splitlines()
    assert sorted(both) == [f"[rank {rank}] step {step} on {rank}" for rank in (0, 1) for step in range(3)]


@pytest.mark.slow
def test_logs_says_where_a_rank_wrote_nothing(tmp_path):
    (tmp_path / "silent.py").write_text("import samestep\nif samestep.init().rank:\n    print('said 1')\n")
    samestep(tmp_path, "run", "-n", "2", "silent.py")
    shown = samestep(tmp_path, "logs")
    assert (shown.stdout, "nothing was written there; --rank all shows" in shown.stderr) == ("", True)
    assert samestep(tmp_path, "logs", "--rank", "1").stdout.endswith("said 1\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["logs", "--rank", "5"], "rank 5 has no log in runs/"),
        (
            ["logs", "nowhere"],
            "there is no run in nowhere or runs/nowhere; see `samestep runs`",
        ),
        (["status", "nowhere"], "there is no run in nowhere"),
        (["runs", "nowhere"], "nowhere is not a directory; write the one where runs are kept"),
        (["export", "nowhere", "-o", "x.pt"], "Path 'nowhere' does not exist"),
        (
            ["submit", "--gres", "gpu:1", "train.py"],
            "no such option '--gres'; --option gives sbatch its own, as",
        ),
        (["stop"], "has ended (failed (7)), so there is nothing to stop"),
    ],
)
def test_what_cannot_be_is_said_in_a_sentence(home, words, said):
    done = samestep(home, *words)
    assert done.returncode == 2
    assert said in done.stderr


def test_a_run_is_followed_watched_and_stopped_by_files_alone(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    words = [sys.executable, "-m", "samestep", "run", "-n", "2", "train.py", "1000", "0"]
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.DEVNULL) as running:
        until = time.monotonic() + 20
        while "step 5 " not in samestep(tmp_path, "logs").stdout and time.monotonic() < until:
            time.sleep(0.1)
        follow = [sys.executable, "-m", "samestep", "logs", "-f"]
        with subprocess.Popen(follow, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as following:
            status = json.loads(samestep(tmp_path, "status", "--json").stdout)
            assert (status["state"], len(status["by_rank"])) == ("running", 2)
            assert 2 < status["steps_per_second"] < 21
            assert status["samples_per_second"] == pytest.approx(2 * status["steps_per_second"], rel=0.01)
            assert samestep(tmp_path, "stop").returncode == 0
            shown = following.communicate(timeout=30)[0].splitlines()
        assert running.wait(timeout=30) == 75
    assert len(shown) > 5
    assert shown == [f"step {step} on 0" for step in range(len(shown))]
    assert "stopped at a checkpoint" in samestep(tmp_path, "status").stdout


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_run_of_another_user_is_named_where_it_cannot_be_stopped(tmp_path):
    run = tmp_path / "runs" / "1127-0600"
    run.mkdir(parents=True)
    record = {
        "argv": ["python", "train.py"],
        "size": 1,
        "host": "elsewhere",
        "pid": 1,
        "started": time.time(),
    }
    (run / "run.json").write_text(json.dumps(record))
    for path in (tmp_path, run.parent, run):
        path.chmod(0o755)
    stop = "import os; from samestep.cli.stop import command; os.seteuid(65534); command.main(['runs/1127-0600'])"
    done = subprocess.run([sys.executable, "-c", stop], cwd=tmp_path, capture_output=True, text=True)
    said = "runs/1127-0600 cannot be written (permission denied); stop the run as the user who started it"
    assert (done.returncode, done.stderr) == (2, f"samestep stop: {said}\n")


def test_a_run_whose_launcher_was_killed_is_not_taken_for_running(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    words = [sys.executable, "-m", "samestep", "run", "-n", "1", "train.py", "1000", "0"]
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        running.stdout.readline()
        running.kill()
        os.waitid(os.P_PID, running.pid, os.WEXITED | os.WNOWAIT)
        # as in a container in which nothing waits for the launcher
        assert "ended without a result" in samestep(tmp_path, "runs").stdout
    assert "ended without a result" in samestep(tmp_path, "runs").stdout
    assert " on 1 rank" in samestep(tmp_path, "status").stdout.splitlines()[0].replace("1 ranks", "")
