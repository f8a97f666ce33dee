"""`samestep scale` measures what is planted, keeps what it has, and says it on 60 columns and in one page."""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from samestep.cli import scale as scale_command
from samestep.errors import UsageError
from samestep.measure.report import Report, plots_of
from samestep.measure.scale import Measured, Plan, Variant, measure, variants
from samestep.measure.verdict import limit_of, rows_of, verdict
from samestep.steptimes import PARTS, SHOWN, Breakdown

PLANTED = Path(__file__).with_name("planted.py")
FAILS = f"""
import os
if os.environ["WORLD_SIZE"] == "2":
    raise ValueError("two")
runpy.run_path({str(PLANTED)!r}, run_name="__main__")
"""
NAMED = {
    "loader": "The loader",
    "rank": "A slow rank",
    "optimizer": "The optimizer",
    "checkpoint": "Checkpoints",
}


def scale(folder: Path, *words: str, columns: int = 60) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "samestep", "scale", *words],
        cwd=folder,
        env={**os.environ, "SAMESTEP_RUN_DIR": "runs", "COLUMNS": str(columns)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[str, str, int]:
    with process:
        try:
            return *process.communicate(timeout=55), process.returncode
        finally:
            process.kill()


def finished(process: subprocess.Popen[str]) -> tuple[str, str]:
    out, err, code = ended(process)
    assert code == 0, err
    return out, err


@pytest.mark.long  # with nothing planted, the model is named in the test below
@pytest.mark.parametrize("slow", NAMED)
def test_a_planted_limit_is_named(tmp_path, slow):
    words = ("-n", "2", "--repeat", "1", "--steps", "20", "--json", str(PLANTED), slow)
    document = json.loads(finished(scale(tmp_path, *words))[0])
    assert document["schema_version"] == 1
    assert f"{NAMED[slow]} limits 2 processes" in document["verdict"].replace(
        "Checkpoints limit", "Checkpoints limits"
    )
    if slow == "rank":
        assert "rank 1" in document["verdict"]
        assert "its forward takes" in document["verdict"]


@pytest.mark.slow
def test_an_interrupted_measurement_goes_on_to_a_report_of_60_columns_and_a_page_that_needs_nothing(tmp_path):
    words = ("-n", "1,2", "--repeat", "1", "--steps", "12", str(PLANTED), "nothing")
    first = scale(tmp_path, *words)
    until = time.monotonic() + 40
    while not [path for path in tmp_path.glob("runs/*/runs.jsonl") if path.read_text().count("\n")]:
        assert time.monotonic() < until
        time.sleep(0.05)
    first.send_signal(signal.SIGINT)
    assert ended(first)[2] == 130
    out, err = finished(scale(tmp_path, *words))
    assert [line[:10] for line in err.splitlines() if line.startswith("run ")] == ["run 2 of 2"]
    lines = out.partition("\nReport:")[0].splitlines()
    assert max(map(len, lines)) <= 60
    assert [line.split()[0] for line in lines[1:3]] == ["1", "2"]
    assert (
        0.6 < float(lines[2].split()[4]) < 1.3
    )  # a pause is as long on two processes; a wrong count doubles it
    assert "More than 1 process is not worth it" in " ".join(" ".join(lines).split())
    assert "The model limits 2 processes" in " ".join(" ".join(lines).split())
    page = next(tmp_path.glob("runs/*/report.html"))
    text = page.read_text()
    assert text.count("<svg") == 3
    assert not re.search(r"""(src|href)="(?!#)|@import|url\((?!#)""", text)
    assert {path.name for path in page.parent.glob("*.png")} == {"throughput.png", "speedup.png", "step.png"}
    assert [path for path in page.parent.iterdir() if path.name.startswith("run-")] == []


def test_two_measurements_of_the_same_script_at_the_same_time_are_refused(tmp_path):
    plan = Plan([str(tmp_path / "train.py")], variants([1], [], 1), 1, 10, False)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("SAMESTEP_RUN_DIR", str(tmp_path))
        plan.directory.mkdir()
    with (plan.directory / "runs.jsonl").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="is written by another `samestep scale` of the same script"):
            measure(plan, lambda *_: None)


def test_a_script_that_takes_no_measured_steps_is_refused(tmp_path):
    (tmp_path / "serial.py").write_text("print('done')\n")
    _, err, code = ended(scale(tmp_path, "-n", "1", "--repeat", "1", "serial.py"))
    assert "serial.py took too few steps over samestep.loader" in err
    assert code == 2


def test_a_failing_script_ends_it_with_the_runs_own_report(tmp_path):
    (tmp_path / "broken.py").write_text("raise ValueError('seven')\n")
    _, err, code = ended(scale(tmp_path, "-n", "1", "--repeat", "1", "broken.py"))
    assert "ValueError: seven" in err
    assert code == 1
    assert "seven" in (tmp_path / re.search(r"^Logs: (\S+)$", err, re.MULTILINE)[1]).read_text()


@pytest.mark.slow
def test_a_size_that_fails_leaves_the_others_measured_and_a_changed_script_is_measured_anew(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(f"import sys, runpy\nsys.argv = ['planted.py', 'nothing']\n{FAILS}")
    words = ("-n", "1,2", "--repeat", "1", "--steps", "12", "train.py")
    out, err, code = ended(scale(tmp_path, *words))
    assert (code, "2 processes failed." in " ".join(out.split())) == (1, True)
    assert "ValueError: two" in err
    kept = {path.name for path in tmp_path.glob("runs/*")}
    script.write_text(script.read_text() + "# changed\n")
    again = scale(tmp_path, *words)
    assert any("run 1 of 2: 1 process" in line for line in again.stderr)
    again.send_signal(signal.SIGINT)
    ended(again)
    assert len({path.name for path in tmp_path.glob("runs/*")} - kept) == 1


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (("--predict", "x"), "--predict x is not a list"),
        (("--predict", "8", "--link", "25GB/s"), "--link 25GB/s is not a bandwidth and a latency"),
        (("-n", "0"), "-n 0 contains 0 processes"),
        (("--cores", "999"), "--cores 999 is more than the"),
    ],
)
def test_a_mistake_in_an_option_is_said_before_anything_runs(tmp_path, wrong, said):
    (tmp_path / "train.py").write_text("")
    _, err, code = ended(scale(tmp_path, *wrong, "train.py"))
    assert (code, err.startswith(f"samestep scale: {said}")) == (2, True), err
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


COMMITS = """
import torch, samestep
model = samestep.replicate(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
train = samestep.loader(torch.utils.data.TensorDataset(torch.ones(64, 8)), 4)
checkpoint = samestep.Checkpoint("commits", every=4, model=model, optimizer=optimizer, train=train)
checkpoint.resume()
for _ in train.epochs(1):
    for (x,) in train:
        model(x).mean().backward()
        optimizer.step()
        checkpoint.step()
"""


@pytest.mark.slow
def test_a_measured_run_leaves_the_scripts_commits_alone_and_what_had_no_devices_is_said(nest, tmp_path):
    (tmp_path / "commits.py").write_text(COMMITS)
    assert nest.wait(nest.start(tmp_path / "commits.py", 0, cwd=tmp_path)) == [0]
    before = sorted(path.name for path in (tmp_path / "commits").iterdir())
    several = ("--vary", "method=ddp,dataparallel")
    words = ("-n", "1", "--repeat", "1", *several, "--steps", "12", "--json", "commits.py")
    document = json.loads(finished(scale(tmp_path, *words))[0])
    assert len(document["rows"]) == 1
    why = "1 process, method=dataparallel was not measured: it needs 2 devices, and 0 are visible."
    assert document["verdict"].endswith(why)
    assert sorted(path.name for path in (tmp_path / "commits").iterdir()) == before


def test_settings_become_variables_and_options_of_ddp():
    found = variants([2], ["bucket_cap_mb=1,2.5", "NCCL_ALGO=Ring", "backend=gloo", "method=ddp"], 1)
    assert [json.loads(variant.env["SAMESTEP_DDP"]) for variant in found] == [
        {"bucket_cap_mb": 1},
        {"bucket_cap_mb": 2.5},
    ]
    assert {variant.env["NCCL_ALGO"] for variant in found} == {"Ring"}
    assert {(variant.env["SAMESTEP_BACKEND"], variant.env["SAMESTEP_METHOD"]) for variant in found} == {
        ("gloo", "ddp")
    }


def test_processes_of_srun_have_as_many_threads_at_each_size(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "3")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [variant.env["OMP_NUM_THREADS"] for variant in variants([1, 2], [], None)] == ["3", "3"]
    assert [variant.env["OMP_NUM_THREADS"] for variant in variants([2], ["OMP_NUM_THREADS=1,2"], None)] == [
        "1",
        "2",
    ]
    assert [variant.env.get("OMP_NUM_THREADS") for variant in variants([2], ["launcher=run"], None)] == [None]


def test_more_processes_than_a_slurm_allocation_holds_are_refused_before_a_run(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_CPUS_PER_NODE", "5(x2),3")
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
    assert len(variants([1, 5], [], 2)) == 2
    with pytest.raises(UsageError) as refused:
        variants([1, 6], [], 2)
    assert str(refused.value) == (
        "-n 6 is more than the 5 processes of 2 cores each that this Slurm allocation has room for; use at most 5, or "
        "fewer --cores"
    )
    assert len(variants([6], ["launcher=run"], 2)) == 1


def test_one_process_drives_all_devices_of_dataparallel(monkeypatch):
    monkeypatch.setattr("samestep.measure.scale.visible_devices", lambda env: ["0", "1", "2", "3"])
    monkeypatch.setattr(
        "samestep.measure.scale.masked", lambda env, names: ({"CUDA_VISIBLE_DEVICES": names}, 2)
    )
    both = variants([2], ["method=ddp,dataparallel"], 1)
    assert [(variant.processes, variant.lacks) for variant in both] == [(2, ""), (1, "")]
    assert both[1].env["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_a_switch_of_ddp_may_be_written_as_in_python():
    on, off = variants([2], ["static_graph=True,False"], 1)
    assert [json.loads(each.env["SAMESTEP_DDP"]) for each in (on, off)] == [
        {"static_graph": True},
        {"static_graph": False},
    ]


def test_throughput_and_step_of_a_row_agree():
    row = of_sizes(run_of(1, 0, 0.1), run_of(1, 1, 0.3))[0]
    assert row.throughput.value * row.step_s.value == pytest.approx(64)
    assert (row.throughput.low, row.throughput.high) == (pytest.approx(64 / 0.3), pytest.approx(640))


@pytest.mark.parametrize(
    ("vary", "said"),
    [
        ("bucket", "is not a name and its values"),
        ("launcher=make", "launcher=make is unknown; choose from run, torchrun, srun, mpirun"),
        ("method=fsdp", "method=fsdp is unknown; choose from ddp, dataparallel"),
        ("n=1,2", "write -n 1,2"),
        ("bucket_cap=1,25", "names no setting; choose from launcher, backend, method, nodes, bucket_cap_mb"),
        ("bucket_cap_mb=1,1e", "has a value that is not a number"),
        ("static_graph=True,no", "static_graph=no is unknown; choose from true, false"),
        (
            "method=dataparallel",
            "method=dataparallel was not measured: it needs 2 devices, and 0 are visible",
        ),
        ("launcher=srun", "launcher=srun was not measured: it needs srun in a Slurm allocation"),
        ("nodes=0", "nodes=0 has a value that is no number of nodes"),
        ("nodes=1,2", "nodes=1 was not measured: it needs srun in a Slurm allocation"),
    ],
)
def test_what_cannot_be_varied_is_said(tmp_path, vary, said):
    (tmp_path / "train.py").touch()
    _, err, code = ended(scale(tmp_path, "--vary", vary, "train.py"))
    assert said in err
    assert code == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--link", "1GB/s,5us"), "--link is for --predict"),
        (("--vary", "backend=gloo", "--predict", "4"), "--predict is about sizes and --vary about settings"),
        (("-n", "0,1"), "-n 0,1 contains 0 processes"),
    ],
)
def test_options_that_do_not_go_together_are_refused_before_anything_runs(tmp_path, words, said):
    (tmp_path / "train.py").touch()
    _, err, code = ended(scale(tmp_path, *words, "train.py"))
    assert said in err
    assert (code, [path.name for path in tmp_path.iterdir()]) == (2, ["train.py"])


def test_processes_that_share_cores_are_said(monkeypatch):
    monkeypatch.setattr(scale_command, "cores", lambda: [0, 1])
    assert scale_command._crowded(2) == []
    assert scale_command._crowded(4) == ["4 processes shared 2 cores and slowed each other down"]
    monkeypatch.setenv("PBS_JOBID", "7")
    assert scale_command._crowded(4) == []


def run_of(size, repeat=0, seconds=0.1, settings=(), **parts):
    of = dict.fromkeys(SHOWN, 0.0) | {"compute": seconds} | parts
    step, rank = sum(of.values()), dict.fromkeys(PARTS, 0.0)
    said = Breakdown(step, 64 / step, 6400, of, [rank] * size, None, None)
    return Measured(Variant(size, 1, settings), repeat, 1.0, 200, said)


def of_sizes(*runs):
    return rows_of(runs, list(dict.fromkeys(run.variant for run in runs)))


def test_efficiency_and_speedup_are_formed_within_each_repeat():
    slow = [run_of(1, 0, 0.1), run_of(2, 0, 0.05), run_of(1, 1, 0.2), run_of(2, 1, 0.1)]
    two = of_sizes(*slow)[1]
    assert (two.speedup.low, two.speedup.high, two.efficiency) == (2.0, 2.0, 1.0)
    assert two.device_s == pytest.approx(2 * 6400 / two.throughput.value)


def test_the_knee_is_the_last_doubling_that_gained_enough():
    rows = of_sizes(run_of(1, seconds=0.08), run_of(2, seconds=0.04), run_of(4, seconds=0.02, exchange=0.018))
    said = verdict(rows)
    assert "2 processes are worth it, if a doubling" in said
    assert "from 2 to 4 processes made it 1.05 times" in said
    assert "The exchange limits 4 processes" in said


def test_compute_that_more_processes_do_not_shorten_is_the_models_limit():
    rows = of_sizes(run_of(1, seconds=0.08), run_of(4, seconds=0.06))
    assert limit_of(rows[-1], rows[0]).name == "compute"
    assert limit_of(rows[0], rows[0]) is None
    assert "Only the model's own compute limits 2 processes" in verdict(of_sizes(run_of(2)))


def test_an_exchange_longer_than_a_step_of_one_process_is_said():
    said = verdict(of_sizes(run_of(1, seconds=0.001), run_of(2, seconds=0.001, exchange=0.005)))
    assert "2 processes are slower than 1 process: speed-up 0.17" in said
    assert "no faster than 1 process: speed-up 1.00" in verdict(of_sizes(run_of(1), run_of(2, 0, 0.1001)))
    assert "the exchange alone takes 5 ms, a step of 1 process 1 ms" in said
    assert "Without that a step would take 1 ms instead of 6 ms" in said


def test_a_measurement_without_repeats_says_so():
    assert "Each was run once" in verdict(of_sizes(run_of(1), run_of(2)))
    assert "once" not in verdict(of_sizes(run_of(1), run_of(1, 1)))


def test_equal_runs_that_differ_much_are_said():
    rows = of_sizes(*(run_of(1, at, seconds) for at, seconds in enumerate((0.1, 0.1, 0.2, 0.2))))
    assert "Equal runs differ by up to 67 %" in verdict(rows)
    assert "Equal runs" not in verdict(of_sizes(run_of(1), run_of(1, 1)))


def test_a_setting_is_faster_only_beyond_the_spread():
    def runs(*seconds):
        return [run_of(2, at, took, (("bucket_cap_mb", "1"),)) for at, took in enumerate(seconds)]

    base = [run_of(2, at, took, (("bucket_cap_mb", "25"),)) for at, took in enumerate((0.1, 0.1, 0.1, 0.1))]
    faster = verdict(of_sizes(*runs(0.08, 0.08, 0.08, 0.08), *base))
    assert "2, bucket_cap_mb=1 is fastest: 1.25 times as fast as 2, bucket_cap_mb=25" in faster
    assert "limits 2 processes, bucket_cap_mb=1 (" in faster  # judged is the fastest, not the last
    assert "No setting is clearly faster" in verdict(of_sizes(*base, *runs(0.08, 0.12, 0.09, 0.11)))
    assert "fastest" not in verdict(of_sizes(*base))  # nothing was measured beside it
    once = verdict(of_sizes(runs(0.05)[0], base[0]))
    assert "In one run of each, 2, bucket_cap_mb=1 was 2.00 times as fast" in once


@pytest.mark.slow
def test_plots_show_values_and_parts_and_escape_what_is_foreign(tmp_path):
    settings = (("OPTION", "a<b"),)
    throughput, speedup, step = plots_of(
        of_sizes(run_of(1, seconds=64 / 1234, settings=settings), run_of(2, exchange=0.1)), tmp_path
    )
    assert "1,234<" in throughput
    assert "OPTION=a&lt;b" in throughput
    assert "ideal" in speedup
    assert all(name in step for name in ("compute", "exchange"))
    assert "optimizer" not in step


@pytest.mark.slow
def test_settings_have_a_line_each_in_tables_and_no_ideal_in_plots(tmp_path):
    rows = of_sizes(*(run_of(2, settings=(("bucket_cap_mb", size),)) for size in ("1", "25")))
    parts = dict(Report(rows, "", []).tables())["Parts of a step"]
    assert parts == [
        ["part of a step", "compute"],
        [f"{rows[0].variant}", "100 %"],
        [f"{rows[1].variant}", "100 %"],
    ]
    assert ["ideal" in plot for plot in plots_of(rows, tmp_path)] == [False] * 3
