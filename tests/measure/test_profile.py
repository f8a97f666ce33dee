"""`samestep profile` writes a trace in Chrome's format, with every rank on one time axis and its parts by name."""

import json
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

TRAIN = """
import torch, samestep
world = samestep.init()
torch.manual_seed(0)
model = samestep.replicate(torch.nn.Sequential(torch.nn.Linear(64, 4000), torch.nn.Linear(4000, 64)))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for (x,) in samestep.loader(torch.utils.data.TensorDataset(torch.randn(400, 64)), 8):
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def profile(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(TRAIN)
    command = [sys.executable, "-m", "samestep", "profile", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=55)


def rows(events):
    """The events that last, by rank and row, in the order of their begin."""
    found = {}
    for event in events:
        if event["ph"] == "X":
            found.setdefault((event["pid"], event["tid"]), []).append(event)
    return {row: sorted(held, key=lambda event: (event["ts"], -event["dur"])) for row, held in found.items()}


@pytest.mark.slow
def test_a_trace_keeps_the_format_and_names_steps_phases_and_buckets_of_each_rank(tmp_path):
    done = profile(tmp_path, "-n", "2", "--steps", "5:8", "train.py")
    assert done.returncode == 0, done.stderr
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    for event in events:
        assert event["ph"] in "XM"
        assert isinstance(event["pid"], int)
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            assert isinstance(event["tid"], int)
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"rank 0", "rank 1"}
    ours = [
        event
        for event in events
        if event["ph"] == "X" and (event["tid"] in (1, 2) or "bucket" in event["name"])
    ]
    for row in rows(ours).values():  # a viewer draws events of a row inside each other, or apart
        for before, after in pairwise(row):
            ends = before["ts"] + before["dur"]
            assert after["ts"] >= ends - 1 or after["ts"] + after["dur"] <= ends + 1
    for rank in (0, 1):
        own = [event for event in events if event["pid"] == rank and event["ph"] == "X"]
        assert [event["name"] for event in own if event["tid"] == 1] == ["step 5", "step 6", "step 7"]
        phases = {event["name"] for event in own if event["tid"] == 2}
        assert {"data", "forward", "backward", "exchange", "optimizer"} <= phases
        buckets = [event["name"] for event in own if event["name"].startswith("bucket ")]
        kilobytes = sum(
            float(size) * (1e3 if unit == "MB" else 1)
            for size, unit in re.findall(r"\(([\d.]+) (kB|MB)\)", "".join(buckets))
        )
        assert kilobytes * 1e3 / 3 == pytest.approx(4 * (2 * 64 * 4000 + 4064), rel=0.1)
    steps = {
        rank: [event for event in events if event["pid"] == rank and event.get("tid") == 1] for rank in (0, 1)
    }
    for first, second in zip(*(rows(steps[rank])[rank, 1] for rank in (0, 1)), strict=True):
        # both are in the exchange of a step at one time, however late one of them begins it
        assert max(first["ts"], second["ts"]) < min(first["ts"] + first["dur"], second["ts"] + second["dur"])


@pytest.mark.slow
def test_only_the_chosen_ranks_are_recorded(tmp_path):
    done = profile(tmp_path, "-n", "2", "--ranks", "1", "--steps", "3:4", "-o", "one.json", "train.py")
    assert done.returncode == 0, done.stderr
    assert {event["pid"] for event in json.loads((tmp_path / "one.json").read_text())["traceEvents"]} == {1}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--steps", "7:7"), "--steps 7:7 is not a range"),
        (("-o", "no/trace.json"), "-o no/trace.json is in no directory: no does not exist"),
        (("--ranks", "2"), "--ranks 2 names rank 2, but there are 2"),
        pytest.param(("-n", "1", "--steps", "900:901"), "ended before step 900 of", marks=pytest.mark.slow),
    ],
)
def test_what_cannot_be_recorded_is_said(tmp_path, words, said):
    done = profile(tmp_path, *words, "train.py")
    assert said in done.stderr
    assert done.returncode == 2
