"""What verify shows before its end, and what it shows of differences that are no mistake."""

import builtins
import csv
import io
import pickle
import random
import re
import signal
import subprocess
import sys
from itertools import takewhile
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
import torch
from forked import Nest
from verify.corpus import Forked

from samestep.cli.verify import _show_table
from samestep.verify.causes import suspects
from samestep.verify.read import Run
from samestep.verify.record.facts import numbers_in
from samestep.verify.record.outputs import _SAVING, Outputs
from samestep.verify.trajectory import Compared, Difference
from samestep.verify.verify import Report, verify

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ended", "code", "came"), [(KeyboardInterrupt(), 130, "Ctrl-C"), (SystemExit(143), 143, "SIGTERM")]
)
def test_runs_that_differ_are_shown_before_the_causes_and_a_signal_then_prints_what_is_known(
    nest: Nest, ended: BaseException, code: int, came: str
) -> None:
    shown: list[str] = []

    def stop(run: str) -> None:
        if "with --same" in run and shown:
            raise ended

    def find(causes: bool) -> Report:
        return verify(
            [str(SCRIPTS / "lr_by_ranks.py")],
            [1, 2],
            causes=causes,
            run=Forked(nest),
            progress=stop,
            differing=lambda report: shown.append(str(report)),
        )

    report = find(causes=False)
    assert (report.exit_code, report.verdict, shown) == (1, "unfinished", [])
    assert str(report) == (
        "not finished: the runs differ: step 1, lr; "
        "--no-causes left out the runs that tell whether it is a mistake, and which"
    )
    report = find(causes=True)
    assert (report.exit_code, report.verdict, len(shown)) == (code, "unfinished", 1)
    assert str(report).startswith(
        f"not finished: the runs differ: step 1, lr; {came} came before the runs that tell"
    )


@pytest.mark.slow
def test_numbers_of_an_evaluation_that_are_noise_are_said_with_their_line(nest: Nest) -> None:
    report = verify([str(SCRIPTS / "noise_in_evaluation.py")], [1, 2], run=Forked(nest))
    assert report.exit_code == 0
    said = r"noise_in_evaluation\.py:\d+ prints other numbers, by as much as it prints others at 1 process from changed"
    assert any(re.match(f"rounding: {said}", line) for line in report.lines)


def test_a_difference_that_is_no_mistake_is_not_shown_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(1, 0, [[]], [{}], Path(), [{}])
    found = Compared(run, run, difference=Difference("samples", 0, None, "samples"))
    for report, shown in (
        (Report({None: found, 1: found}, False, is_augmented=True), "step 1, samples (no mistake)"),
        (Report({1: found, 2: found}, False), "step 1, samples"),
    ):
        _show_table(report)
        _, *lines = capsys.readouterr().out.splitlines()
        assert [line[-len(shown) :] for line in lines] == [shown] * len(report.outcomes)


def test_what_a_run_says_is_shown_where_the_runs_are_not_the_same() -> None:
    run = Run(1, 0, [[]], [{}], Path(), [{}])
    said = ["the loss has a sum over samples"]
    other = Compared(run, run, difference=Difference("loss", 0, None, "loss"))
    assert "said: the loss has a sum over samples" in Report({1: other}, False, said=said).lines
    assert Report({1: Compared(run, run)}, False, said=said).lines == ["same to the bit"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("noise_in_the_loop", "without it, random draws are each rank's own"),
        (
            "padded_mean",
            "without it, batches that collate_fn makes of a share (padding, a mean) are each rank's own",
        ),
        (
            "standardized_by_collate",
            "without it, dropout masks and batches that collate_fn makes of a share (padding,",
        ),
    ],
)
def test_what_each_rank_draws_is_told_from_what_collate_fn_makes_of_its_share(
    script: str, words: str, nest: Nest
) -> None:
    assert words in str(verify([str(SCRIPTS / f"{script}.py")], [1, 2], run=Forked(nest)))


@pytest.mark.slow
@pytest.mark.parametrize("steps", [2, 1000])
def test_a_run_that_is_cut_says_that_what_it_prints_later_was_not_compared(steps: int, nest: Nest) -> None:
    report = verify([str(SCRIPTS / "share_accuracy.py")], [1, 2], steps=steps, run=Forked(nest))
    assert report.verdict == ("rounding" if steps == 2 else "printed"), report
    assert str(report).endswith("after the last of these steps was not compared") == (steps == 2)


def _recorded(monkeypatch: pytest.MonkeyPatch, step: int) -> list[dict[str, Any]]:
    """What is recorded of the outputs from here to the end of a test."""
    for home, name in ((builtins, "open"), (io, "open"), *_SAVING):
        monkeypatch.setattr(home, name, getattr(home, name))  # to be put back
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.TextIOWrapper(io.BytesIO()))
    rows: list[dict[str, Any]] = []
    Outputs(rows.append, lambda: (step, True), set).begin()
    return rows


def test_a_file_that_a_script_leaves_to_python_is_written_at_once_and_noted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = _recorded(monkeypatch, 0)
    with pytest.warns(ResourceWarning):
        open("log.txt", "w").write("loss 0.5\nloss 0.25")  # noqa: SIM115
    assert Path("log.txt").read_bytes() == b"loss 0.5\nloss 0.25"
    with open("log.txt", "a", newline="") as file:
        csv.writer(file).writerow([1, 2])
        assert (file.name, file.mode) == ("log.txt", "a")
    assert Path("log.txt").read_bytes() == b"loss 0.5\nloss 0.251,2\r\n"
    assert [row["text"] for row in rows] == ["log.txt: loss 0.5", "log.txt: loss 0.25", "log.txt: 1,2\r"]


def test_what_numpy_and_pickle_save_is_noted_as_what_torch_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = _recorded(monkeypatch, 7)
    np.save("rows.npy", np.array([0.0, 2.0]))
    np.save(file=Path("objects.npy"), arr=np.array([{"a": 1}], dtype=object), allow_pickle=True)
    np.savez("more.npz", np.array([3.0, 4.0]), right=np.array(5))
    np.savez_compressed("small.npz", right=6)
    with open("state.pkl", "wb") as file:
        pickle.dump({"loss": 0.5, "names": ["ant"]}, file)
        np.save(file, 7)
    pickle.dump(8, io.BytesIO())
    with pytest.raises(TypeError, match="dump"):
        pickle.dump(9)
    assert [row["text"] for row in rows if row["verb"] == "saves"] == [
        f"{name} after step 7"
        for name in ("rows.npy", "objects.npy", "more.npz", "small.npz", "state.pkl", "state.pkl")
    ]
    assert [row["text"] for row in rows if row["verb"] == "writes"] == [
        "rows.npy: 2 numbers, norm 2, of its first half 0",
        "more.npz: ['arr_0'] = 2 numbers, norm 5, of its first half 3",
        "more.npz: ['right'] = 5",
        "small.npz: ['right'] = 6",
        "state.pkl: ['loss'] = 0.5",
        "state.pkl: 7",
    ]
    assert np.load("rows.npy").tolist() == [0.0, 2.0]


def test_a_saved_file_is_noted_by_its_numbers_without_what_is_compared_at_each_step() -> None:
    model = torch.nn.Linear(2, 1)
    trained = {parameter.data_ptr() for parameter in model.parameters()}
    state = {
        "losses": [3.0, 4.0],
        "best": {"accuracy": np.float64(0.5), "epoch": 2, "flag": True, "name": "run 5"},
        "predictions": [torch.tensor([0.0, 2.0]), None],
        "model": model.state_dict(),
        "optimizer": torch.optim.SGD(model.parameters(), 0.1).state_dict(),
        "random": {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
        },
        "seeds": {"torch": 2**40, "hash": 2**70},
    }
    assert [*numbers_in(state, trained)] == [
        "['losses'] = 2 numbers, norm 5, of its first half 3",
        "['best']['accuracy'] = 0.5",
        "['best']['epoch'] = 2",
        "['predictions'][0] = 2 numbers, norm 2, of its first half 0",
    ]


@pytest.mark.parametrize("kind", ["failed", "samples"])
def test_a_failure_that_comes_and_goes_is_not_put_down_to_what_samples_draw(kind: str) -> None:
    serial = Run(1, 0, [[]], [{"serial": True}], Path(), [{}])
    failed = Run(2, 1, [[], []], [{}, {}], Path(), [{}, {}], "OSError: no space left")
    most_certain = next(suspects(Compared(serial, failed, Difference(kind, None, None, ""))))
    assert (most_certain.removed == "augment") == (kind != "failed")


@pytest.mark.slow
def test_a_crash_is_shown_before_the_runs_that_look_for_its_cause() -> None:
    Path("crash.py").write_text(
        dedent(
            """
            import torch, samestep
            world = samestep.init()
            data = torch.utils.data.TensorDataset(torch.ones(12, 2))
            model = samestep.replicate(torch.nn.Linear(2, 1))
            optimizer = torch.optim.SGD(model.parameters())
            for (x,) in samestep.loader(data, batch_size=6):
                model(x).mean().backward()
                optimizer.step()
                assert world.size == 1, "why"
            """
        )
    )
    command = [sys.executable, "-m", "samestep", "verify", "-n", "1,2", "crash.py"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        before = "".join(takewhile(lambda line: "Ctrl-C" not in line, lines))
        process.send_signal(signal.SIGINT)
        process.stderr.read()
    assert "AssertionError: why" in before
