"""What a run leaves for the next one, and what verify leaves."""

import json
import tempfile
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from forked import Nest
from verify.corpus import Forked

from samestep.errors import UsageError
from samestep.measure.trial import Result, Trial
from samestep.verify.verify import verify


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


_BEGINS = """
import sys, torch, samestep
from pathlib import Path
torch.manual_seed(0)
samestep.init()
home = Path(__file__).parent
"""
_TRAINS = """
for x in samestep.loader(torch.randn(20, 3), 4, shuffle=True):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
"""
_MODEL = """
model = samestep.replicate(torch.nn.Linear(3, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
"""
_FOUND = """
if not (home / "data.pt").exists():
    samestep.save(home / "data.pt", {"x": torch.randn(9)})
samestep.load(home / "data.pt")
"""
_ASKED = """
if not (home / "data.pt").exists():
    samestep.save(home / "data.pt", {"x": torch.randn(9)})
"""
_UNSEEDED = """
torch.seed()
(home / "log.txt").exists()
open(home / "log.txt", "w").write("begun")
"""
_RESUMED = """
if (home / "last.pt").exists():
    model.load_state_dict(samestep.load(home / "last.pt"))
"""
_KEPT = 'samestep.save(home / "last.pt", model.state_dict())\n'


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (_FOUND + _MODEL + _TRAINS, "the first run leaves a file that later ones read"),
        (_ASKED + _MODEL + _TRAINS, "the first run leaves a file that later ones read"),
        (_UNSEEDED + _MODEL + _TRAINS, "no seed is set"),
        (_MODEL + _RESUMED + _TRAINS + _KEPT, "again.py begins from last.pt (again.py:"),
        (
            '(home / "made").mkdir()\n' + _MODEL + _TRAINS,
            "again.py fails when it is started again ([Errno 17]",
        ),
    ],
    ids=["cache", "asked", "unseeded", "resumed", "directory"],
)
def test_a_script_whose_next_start_is_another_is_not_taken_for_one_without_a_seed(
    lines: str, said: str, nest: Nest
) -> None:
    script = Path("again.py").absolute()
    script.write_text(_BEGINS + lines)
    try:
        found = verify([str(script)], [1, 2], run=Forked(nest)).lines
    except UsageError as refused:
        found = [str(refused)]
    found = [line for line in found if not line.startswith("said: ")]
    assert said in found[0]
    assert len(found) == 1 or found[1].startswith("same to rounding")


_RACING = """
import os
for x in samestep.loader(torch.randn(20, 3), 4, shuffle=True):
    optimizer.zero_grad()
    (model(x).square().mean() * (2 if os.environ["ODD"] == "1" and len(x) < 4 else 1)).backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_what_only_some_runs_have_is_not_explained_by_an_experiment(nest: Nest) -> None:
    script, trials, run = Path("races.py").absolute(), count(), Forked(nest)
    script.write_text(_BEGINS + _MODEL + _RACING)

    def some(trial: Trial) -> Result:
        odd = str(next(trials) % 2) if trial.size > 1 else "0"
        return run(replace(trial, env={**trial.env, "ODD": odd}))

    next(trials)  # the first run of two ranks is odd
    report = verify([str(script)], [1, 2], run=some)
    assert report.verdict == "different"
    (cause,) = report.causes
    assert cause.sentence.startswith("two runs at 2 processes differ, also with seeds set")


_IN_TIME = """
import os, time
began = time.time() - float(os.environ["BUSY"])
for x in samestep.loader(torch.randn(20, 3), 4, shuffle=True):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    if time.time() - began > 1e4:
        break
"""


@pytest.mark.slow
def test_a_script_that_stops_by_the_clock_has_one_cause_however_far_it_comes_twice(nest: Nest) -> None:
    script, run = Path("in_time.py").absolute(), Forked(nest)
    script.write_text(_BEGINS + _MODEL + _IN_TIME)

    def busy(trial: Trial) -> Result:
        is_real = "clock" not in json.loads(trial.through[2])["without"]
        return run(replace(trial, env={**trial.env, "BUSY": "1e5" if is_real and trial.size == 1 else "0"}))

    report = verify([str(script)], [1, 2], run=busy)
    assert [cause.removed for cause in report.causes] == ["clock"]
    assert "decides what is trained (in_time.py:" in str(report)


_TIMED = """
import time
net = samestep.replicate(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(), torch.nn.Linear(3, 1)))
optimizer = torch.optim.SGD(net.parameters(), 0.1)
began = time.time()
for x in samestep.loader(torch.randn(20, 3), 4, shuffle=True):
    optimizer.zero_grad()
    net(x).square().mean().backward()
    optimizer.step()
print(f"took {time.time() - began:.1f} s")
"""


@pytest.mark.slow
def test_the_clock_is_not_suspected_where_equal_runs_repeat(nest: Nest) -> None:
    script, run = Path("timed.py").absolute(), Forked(nest)
    script.write_text(_BEGINS + _TIMED)
    clocks = []

    def noted(trial: Trial) -> Result:
        clocks.append("clock" in json.loads(trial.through[2])["without"])
        return run(trial)

    assert verify([str(script)], [1, 2], run=noted).verdict == "with_same"
    assert clocks
    assert not any(clocks)


_AT_A_BIT = """
import os
for step, x in enumerate(samestep.loader(torch.randn(20, 3), 4, shuffle=True)):
    loss = model(x).square().mean()
    if step == 2 and os.environ.get("FLIPPED"):
        loss = loss + 1e-3 * model.weight.sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_mistake", [False, True])
def test_what_is_gone_from_changed_last_bits_is_rounding_and_no_mistake(nest: Nest, is_mistake: bool) -> None:
    """A relu that the last bit opens at 2 processes, and does not in the first run from changed last bits."""
    script, run = Path("at_a_bit.py").absolute(), Forked(nest)
    script.write_text(_BEGINS + _MODEL + _AT_A_BIT)

    def flipped(trial: Trial) -> Result:
        options = json.loads(trial.through[2])
        is_flipped = trial.size > 1 and (is_mistake or not options["nudge"])
        return run(replace(trial, env={**trial.env, "FLIPPED": "1" * is_flipped}))

    report = verify([str(script)], [1, 2], run=flipped)
    assert report.verdict == ("different" if is_mistake else "rounding")
    assert ("in step 3 a last bit decides" in str(report.lines)) != is_mistake
