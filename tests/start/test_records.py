"""A failure is told by the record that the worker left, of this attempt only."""

import re

import pytest

_SILENT = """
    import os, samestep
    world = samestep.init()
    if world.rank == 1:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
            os._exit(3)
        raise ValueError("no shard 7")
    samestep.sum(1)
"""


@pytest.mark.slow
def test_a_failure_is_told_by_the_workers_record_where_stderr_shows_none(launcher):
    launcher.write(_SILENT)
    code, _, err = launcher.run("-n", "2", "--fork", "train.py")
    assert code == 1
    lines = err.splitlines()
    assert lines[-5:-2] == [
        "  train.py:8 in <module>",
        '    raise ValueError("no shard 7")',
        "ValueError: no shard 7",
    ]
    assert "failed on rank 1 of 2" in err


@pytest.mark.slow
def test_the_record_of_an_earlier_attempt_is_not_believed(launcher):
    launcher.write(_SILENT)
    code, _, err = launcher.run("-n", "2", "--fork", "--max-restarts", "1", "train.py")
    assert code == 3
    assert "ValueError: no shard 7): restart 1 of 1" in err
    assert "no shard 7" not in err[err.index("failed on rank 1 of 2") :]


@pytest.mark.slow
def test_a_rank_that_ends_early_is_told_with_the_line_where_another_waited(launcher):
    launcher.write("""
        import samestep
        if samestep.init().rank == 1:
            samestep.save("best.pt", {})
    """)
    code, _, err = launcher.run("-n", "2", "--fork", "train.py")
    assert code == 1
    assert "failed on rank 0 of 2" in err
    assert err.splitlines()[-6:-2] == [
        "  train.py:4 in <module>",
        '    samestep.save("best.pt", {})',
        "rank 0 came to the end of the script with exit code 0 while others waited for it in this line",
        "samestep.errors.RanksDiffer: ranks are at different calls: rank 0 at the end of the script, rank 1 at "
        "samestep.save (train.py:4); every rank has to make the same calls in the same order",
    ]


@pytest.mark.slow
def test_the_line_of_an_os_exit_is_told_also_where_its_code_is_0(launcher):
    launcher.write("""
        import os, samestep
        if samestep.init().rank == 1:
            os._exit(0)
        samestep.sum(1)
    """)
    code, _, err = launcher.run("-n", "2", "--fork", "train.py")
    assert code == 1
    assert "failed on rank 1 of 2" in err
    said = "rank 1 left the script at train.py:4 with exit code 0 while others waited for it in this line"
    assert err.splitlines()[-4:-2] == ["    samestep.sum(1)", said]


@pytest.mark.parametrize("made_again", ["", "os.mkdir(os.environ['SAMESTEP_RUN'])"])
def test_a_runs_directory_that_the_script_removed_is_said_to_be_and_no_log_in_it_is_named(
    launcher, made_again
):
    launcher.write(f"""
        import os, shutil
        shutil.rmtree(os.environ["SAMESTEP_RUN"])
        {made_again}
        raise ValueError("mine")
    """)
    code, _, err = launcher.run("-n", "1", "train.py")
    assert (code, "Logs:" in err) == (1, False)
    assert re.search(r"\nruns/[\d-]+ was removed, and the logs in it\.\n$", err), err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "loader"),
    [
        ("__getitem__", "Shards(), 2, num_workers=1"),
        ("__iter__", "Stream(), 2, num_workers=1"),
        ("__call__", "range(8), 2, num_workers=1, collate_fn=Collate()"),
    ],
)
def test_a_sys_exit_in_a_loader_worker_is_told_with_its_line(place, loader, launcher):
    launcher.write(f"""
        import sys, samestep, torch
        class Shards(list):
            def __len__(self):
                return 8
            def __getitem__(self, index):
                sys.exit("no shard")
        class Stream(torch.utils.data.IterableDataset):
            def __iter__(self):
                yield from range(5)
                sys.exit("no shard")
        class Collate:
            def __call__(self, samples):
                sys.exit("no shard")
        def main():
            for _ in samestep.loader({loader}):
                pass
        main()
    """)
    code, _, err = launcher.run("-n", "2", "--fork", "train.py")
    assert code == 1
    line = {"__getitem__": 7, "__iter__": 11, "__call__": 14}[place]
    assert err.splitlines()[-5:-2] == [
        f"  train.py:{line} in {place}",
        '    sys.exit("no shard")',
        "RuntimeError: a worker of a loader called sys.exit('no shard'); raise an exception there",
    ]


def test_a_failure_is_told_also_where_the_working_directory_was_removed(launcher):
    launcher.write("""
        import os, shutil
        if os.environ["RANK"] == "1":
            shutil.rmtree(os.getcwd())
            raise ValueError("no shard 7")
    """)
    code, _, err = launcher.run("-n", "2", "train.py")
    assert (code, "\nValueError: no shard 7\n" in err) == (1, True)


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--fork", "--no-fork"])
def test_a_failure_is_told_where_the_script_prints_its_exceptions_itself(launcher, option):
    launcher.write("""
        import sys, samestep
        world = samestep.init()
        sys.excepthook = lambda *_: print("sorry", file=sys.stderr)
        if world.rank == 1:
            raise ValueError("no shard 7")
        samestep.sum(1)
    """)
    code, _, err = launcher.run("-n", "2", option, "train.py")
    assert code == 1
    assert err.splitlines()[-4:-2] == ['    raise ValueError("no shard 7")', "ValueError: no shard 7"]
    assert "failed on rank 1 of 2" in err


@pytest.mark.slow
def test_a_commit_that_failed_at_the_end_is_told_as_the_failure_and_was_told_at_the_start(launcher):
    launcher.write(
        """
        import torch, samestep
        checkpoint = samestep.Checkpoint("/proc/none", model=torch.nn.Linear(1, 1))
        checkpoint.resume()
        print("training", file=__import__("sys").stderr)
        checkpoint.commit()
        """
    )
    code, _, err = launcher.run("-n", "1", "train.py")
    assert code == 1
    at_start, _, rest = err.partition("training")
    assert "samestep: commits would fail now: /proc/none cannot be written" in at_start
    assert "samestep.errors.CheckpointError: checkpoint skipped: /proc/none cannot be written" in rest
