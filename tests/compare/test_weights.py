"""read() opens every kind of weights file, runs code of none, and says in a sentence what it cannot read."""

import math
import os
import pickle
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from samestep.compare.compare import compare
from samestep.compare.weights import read
from samestep.errors import CheckpointError
from samestep.state import file as carry
from samestep.state.directory import CheckpointDirectory
from samestep.train.checkpoint.capture import pack

STATE = {"a.weight": torch.arange(6.0).reshape(2, 3), "a.bias": torch.zeros(()), "n": torch.empty(0, 3)}


class _Canary:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.path}",)


def _carried(path: Path, state: object) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    carry.write(descriptor, pack(state))
    os.close(descriptor)


@pytest.mark.parametrize(
    "write",
    [
        lambda path: torch.save(STATE, path),
        lambda path: torch.save(STATE, path, _use_new_zipfile_serialization=False),
        lambda path: save_file(STATE, path),
        lambda path: _carried(path, STATE),
    ],
    ids=["torch", "torch before 1.6", "safetensors", "samestep"],
)
def test_every_format_gives_the_same_state_and_every_torn_one_a_sentence(
    write: object, tmp_path: Path
) -> None:
    path = tmp_path / "weights"
    write(path)  # type: ignore[operator]
    assert compare(STATE, read(path).state).verdict == "same"
    whole = path.read_bytes()
    for length in (*range(0, len(whole), 97), len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=rf"^{re.escape(str(path))} [^\n]*$"):
            read(path)


@pytest.mark.parametrize("as_torch", [True, False])
def test_code_in_a_file_is_not_run(as_torch: bool, tmp_path: Path) -> None:
    path, canary = tmp_path / "weights.pt", tmp_path / "canary"
    state = {"a": torch.ones(1), "b": _Canary(canary)}
    torch.save(state, path) if as_torch else path.write_bytes(pickle.dumps(state))
    with pytest.raises(CheckpointError, match="pickle"):
        read(path)
    assert not canary.exists()
    subprocess.run(
        [sys.executable, "-c", f"import pickle; pickle.load(open({str(path)!r}, 'rb'))"], capture_output=True
    )
    assert canary.exists() != as_torch  # the plain pickle is live, so its silence above means something


def _text(path: Path) -> None:
    path.write_text("learning_rate: 0.1\n")


@pytest.mark.parametrize(
    ("write", "sentence"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.touch(), "is empty"),
        (_text, r"is not a weights file \(it begins with b'learning'\)"),
        (lambda path: path.mkdir(), "holds no good checkpoint"),
        (lambda path: os.mkfifo(path), "is not a file"),
        (lambda path: torch.save({}, path), "holds no tensor and no value"),
        (lambda path: torch.save({"a": Namespace(lr=1)}, path), r"holds a pickled argparse\.Namespace, "),
        (
            lambda path: torch.save(torch.nn.Linear(1, 1), path),
            r"holds a pickled torch\S+Linear, .* state_dict",
        ),
        (lambda path: torch.save({"w": torch.ones(1).expand(10**12)}, path), r"claims 4\.0e\+12 bytes for w"),
        (lambda path: torch.save({"w": torch.ones(9, device="meta")}, path), "holds w without its data"),
        (lambda path: torch.save({math.nan: 1, float("nan"): 2}, path), r"two values are named \[nan\]"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(write: object, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    write(path)  # type: ignore[operator]
    with pytest.raises(CheckpointError, match=rf"^{re.escape(str(path))} [^\n]*{sentence}[^\n]*$"):
        read(path)


def test_a_directory_is_its_newest_good_checkpoint(tmp_path: Path) -> None:
    commits = CheckpointDirectory(tmp_path, keep=3)
    for number in (1, 2, 3):
        newest = commits.commit(pack({"w": torch.tensor([number])}), number * 10)
    newest.write_bytes(newest.read_bytes()[:-1])
    found = read(tmp_path)
    assert compare({"w": torch.tensor([2])}, found.state).verdict == "same"
    assert f"{newest.name} is torn" in found.notes[0]
