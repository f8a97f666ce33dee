"""A run that is asked to stop ends after one and the same step on all ranks, committed, with exit code 75."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from textwrap import dedent

import pytest
from trail import Trail, differing_bits

from samestep.state import file

SURVIVOR = Path(__file__).parents[2] / "survivor.py"
LOOP = """
    import os, signal, sys, time
    import torch, samestep
    world = samestep.init()
    model = samestep.replicate(torch.nn.Linear(4, 3))
    data = torch.utils.data.TensorDataset(torch.arange(48.0).reshape(12, 4))
    train = samestep.loader(data, 3, shuffle=True)
    run = samestep.Checkpoint("DIRECTORY", every=1000, model=model, train=train)
    run.resume()
    def steps(epochs=3):
        for epoch in train.epochs(epochs):
            for x, in train:
                model(x).sum().backward()
                yield
                run.step()
    def hear(name="SIGTERM", rank=0):
        if world.rank == rank:
            os.kill(os.getpid(), signal.Signals[name])
"""


@pytest.fixture(scope="module")
def undisturbed(nest, tmp_path_factory):
    trail = Trail(tmp_path_factory.mktemp("undisturbed"))
    assert go(nest, trail, 1)[0] == [0]
    return trail


@pytest.fixture
def loop(nest, tmp_path):
    """Runs the loop with what is added: exit codes, what each rank said, and the steps committed."""

    def started(source, size=1, env=None, directory=tmp_path / "commits"):
        script = tmp_path / "train.py"
        script.write_text(dedent(LOOP).replace("DIRECTORY", str(directory)) + dedent(source))
        ranks = nest.start(script, size, env=env)
        return nest.wait(ranks), [rank.said for rank in ranks], steps(directory)

    return started


def go(nest, trail, size, *options, env=None):
    ranks = nest.start(SURVIVOR, size, trail.directory, "--notes", trail.log, *options, env=env)
    return nest.wait(ranks), [rank.said for rank in ranks]


def steps(directory):
    return [entry.step for entry in file.listing(directory)] if directory.exists() else []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size", "rank"),
    [
        ("SIGTERM", 1, 0),
        ("SIGTERM", 2, 1),
        ("SIGTERM", 3, 2),
        ("SIGUSR1", 3, 0),
        ("SIGINT", 2, 0),
        ("SIGHUP", 2, 1),
    ],
)
def test_a_signal_that_one_rank_hears_stops_all_after_one_step_and_costs_no_bit(
    nest, undisturbed, tmp_path, name, size, rank
):
    trail = Trail(tmp_path)
    codes, said = go(nest, trail, size, "--hear", f"{name}@5/{rank}", "--every", 1000, "--pause", 0.1)
    assert codes == [75] * size
    (step,) = steps(trail.directory)
    assert 5 <= step < 12
    assert said == [
        f"samestep: stopped by {name} after step {step}, which is committed in {trail.directory}; "
        "run it again to go on\n",
        *[""] * (size - 1),
    ]
    assert len(trail.taken()) == step
    codes, _ = go(nest, trail, 4 - size, "--attempt", 2)
    assert codes == [0] * (4 - size)
    assert trail.against(undisturbed) == (0, 0)
    assert differing_bits(trail.state(), undisturbed.state()) == 0


@pytest.mark.parametrize(
    "name",
    [
        "SIGTERM",
        pytest.param("SIGUSR1", marks=pytest.mark.long),
        pytest.param("SIGINT", marks=pytest.mark.long),
    ],
)
def test_a_signal_to_all_processes_of_a_job_spares_the_loader_workers_until_the_commit(nest, tmp_path, name):
    trail = Trail(tmp_path)
    options = ("--notes", trail.log, "--workers", 2, "--pause", 0.1, "--every", 1000)
    ranks = nest.start(SURVIVOR, 2, trail.directory, *options)
    while len(trail.taken()) < 3:
        nest.look(0.02)
    for rank in ranks:
        os.killpg(rank.pid, signal.Signals[name])
    # torch would wait 5 s for each loader worker at the end
    assert nest.wait(ranks, 9) == [75, 75], "\n".join(rank.said for rank in ranks)
    assert len(trail.taken()) == steps(trail.directory)[0]


def test_the_first_step_can_be_the_last(loop):
    codes, said, committed = loop("for _ in steps(): hear(rank=1)", 2)
    assert (codes, committed) == ([75, 75], [1])
    assert "stopped by SIGTERM after step 1," in said[0]


def test_a_signal_twice_is_as_good_as_once(loop):
    codes, said, committed = loop("for _ in steps(): hear(); hear(); hear('SIGUSR1')", 2)
    assert (codes, committed) == ([75, 75], [1])
    assert said[0].count("stopped by") == 1


def test_a_signal_in_evaluation_is_heard_in_the_steps_after_it(loop):
    codes, _, committed = loop(
        """
        for number, _ in enumerate(steps()):
            time.sleep(0.1)
            if number == 4:
                model.eval()
                with torch.no_grad():
                    for x, in samestep.loader(data, 6): hear(rank=1); model(x)
                model.train()
        """,
        2,
    )
    assert codes == [75, 75]
    assert len(committed) == 1
    assert 5 <= committed[0] < 12


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2])
def test_a_signal_is_heard_within_a_step_when_the_pace_has_changed(loop, rank):
    codes, _, committed = loop(
        f"""
        for number, _ in enumerate(steps(epochs=100), 1):
            time.sleep(0.001 if number < 60 else 0.5)
            if number == 62: hear(rank={rank})
        """,
        3,
    )
    assert codes == [75, 75, 75]
    assert committed[0] in (62, 63)


def test_a_file_is_heard_within_a_second_when_the_pace_has_changed(loop, tmp_path):
    codes, said, committed = loop(
        """
        from samestep.rundir import STOP
        from pathlib import Path
        for number, _ in enumerate(steps(epochs=100), 1):
            time.sleep(0.001 if number < 60 else 0.3)
            if number == 62 and world.rank == 0: Path(os.environ["SAMESTEP_RUN"], STOP).touch()
        """,
        2,
        env={"SAMESTEP_RUN": str(tmp_path)},
    )
    assert codes == [75, 75]
    assert 62 <= committed[0] <= 67
    assert "samestep stop" in said[0]


def test_a_signal_after_the_last_step_leaves_a_finished_run(loop):
    codes, _, committed = loop("for _ in steps(): pass\nhear()", 2)
    assert (codes, committed) == ([0, 0], [12])


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_a_signal_during_a_commit_waits_for_it_and_commits_the_newer_step(loop, size):
    codes, _, committed = loop(
        """
        model.register_buffer("bulk", torch.zeros(30_000_000))
        for number, _ in enumerate(steps()):
            time.sleep(0.2)
            if number == 2:
                run.commit()
                assert world.rank or run._writer.is_writing
                hear(rank=world.size - 1)
        """,
        size,
    )
    assert codes == [75] * size
    assert committed in ([3, 2], [4, 2])


def test_a_second_interrupt_does_not_wait(loop):
    codes, said, committed = loop("for _ in steps(): hear('SIGINT'); hear('SIGINT')")
    assert (codes, committed) == ([130], [])
    assert said[0].endswith("KeyboardInterrupt\n")


def test_a_run_stops_in_time_before_its_job_ends(loop, tmp_path):
    def job(seconds):
        return {"SLURM_JOB_END_TIME": int(time.time()) + seconds}

    assert loop("for _ in steps(): pass", 2, env=job(60))[0] == [0, 0]
    env = {**job(12), "SAMESTEP_RUN": tmp_path}
    codes, said, _ = loop("for _ in steps(6): time.sleep(0.05)", 2, env=env)
    assert codes == [75, 75]
    assert "stopped by the job's time limit after step" in said[0]
    assert (tmp_path / "time-is-up").exists(), "a launcher would start it again"


def test_a_time_limit_too_short_for_a_measured_commit_is_warned_of_once(loop):
    now = int(time.time())
    env = {"SLURM_JOB_START_TIME": now - 8, "SLURM_JOB_END_TIME": now + 1}
    codes, said, _ = loop("for _ in steps(): pass", 2, env=env)
    assert codes == [75, 75]
    warning = (
        r"samestep: a commit takes 0\.\d s and this job's time limit is 9 s, so almost nothing is trained"
    )
    assert len(re.findall(warning, "".join(said))) == 1
    enough = {"SLURM_JOB_START_TIME": now - 3600, "SLURM_JOB_END_TIME": now + 1}
    assert "a commit takes" not in "".join(loop("for _ in steps(): pass", 2, env=enough)[1])


def test_a_resumed_run_knows_how_long_its_commits_take(loop, tmp_path):
    slow = "run._commit_seconds = 3600.0\nrun._note_commit = lambda seconds: None\nfor _ in steps(): hear()"
    assert loop(slow)[0] == [75]
    codes, said, _ = loop("for _ in steps(): pass", env={"SLURM_JOB_END_TIME": int(time.time()) + 1800})
    assert codes == [75]
    assert "a commit takes 3600.0 s" in said[0]
    assert "stopped by the job's time limit after step 2" in said[0]


def test_a_file_in_the_runs_directory_stops_it(loop, tmp_path):
    (tmp_path / "stop").touch()
    codes, said, committed = loop("for _ in steps(): pass", 2, env={"SAMESTEP_RUN": tmp_path})
    assert (codes, committed) == ([75, 75], [1])
    assert "stopped by samestep stop after step 1" in said[0]


def test_a_run_without_a_directory_of_its_own_stops_too(loop):
    codes, _, committed = loop("for _ in steps(): hear()", env={"SAMESTEP_RUN": os.devnull})
    assert (codes, committed) == ([75], [1])


def test_a_stop_that_could_not_be_committed_is_a_failure(loop, tmp_path):
    source = f"import shutil\nif not world.rank: shutil.rmtree({str(tmp_path / 'commits')!r})\nfor _ in steps(): hear()"
    codes, said, _ = loop(source, 2, directory=tmp_path / "commits" / "deeper")
    assert codes == [1, 1]
    assert all("CheckpointError: checkpoint skipped: " in text for text in said)


def test_what_is_ignored_from_the_start_stays_ignored(nest, tmp_path):
    script = tmp_path / "train.py"
    ignore = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    source = dedent(LOOP).replace("DIRECTORY", str(tmp_path / "commits")) + "for _ in steps(): hear('SIGINT')"
    script.write_text(ignore + source)
    assert nest.wait(nest.start(script, 1)) == [0]


def launched(*command, home):
    done = subprocess.run(
        [sys.executable, "-m", *map(str, command)], cwd=home, capture_output=True, text=True, timeout=55
    )
    return done.returncode, done.stderr


@pytest.mark.slow
def test_the_launcher_starts_a_stopped_run_again_until_it_is_done(undisturbed, tmp_path):
    trail = Trail(tmp_path)
    code, said = launched(
        *(
            "samestep",
            "run",
            "-n",
            2,
            "--fork",
            "--restart-on",
            75,
            "--max-restarts",
            3,
            SURVIVOR,
            trail.directory,
        ),
        *("--notes", trail.log, "--hear", "SIGUSR1@8/1", "--pause", 0.15),
        home=tmp_path,
    )
    assert code == 0, said
    assert len(re.findall("stopped by SIGUSR1 after step", said)) == 1
    assert trail.against(undisturbed) == (0, 0)
    assert differing_bits(trail.state(), undisturbed.state()) == 0


@pytest.mark.long
def test_under_torchrun_the_commit_is_made_and_the_exit_code_is_torchruns(nest, undisturbed, tmp_path):
    trail = Trail(tmp_path)
    run = ("torch.distributed.run", "--standalone", "--nproc-per-node=2", SURVIVOR, trail.directory)
    code, said = launched(*run, "--notes", trail.log, "--hear", "SIGTERM@5/1", "--pause", 0.15, home=tmp_path)
    assert code == 1, said
    assert "stopped by SIGTERM after step" in said
    assert go(nest, trail, 2)[0] == [0, 0]
    assert differing_bits(trail.state(), undisturbed.state()) == 0
