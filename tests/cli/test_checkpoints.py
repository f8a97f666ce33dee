"""`samestep checkpoints` and `samestep export` say what lies in a directory, and take weights out of it."""

import json
import os
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from samestep.cli import checkpoints, export
from samestep.state.directory import CheckpointDirectory
from samestep.train.checkpoint import capture as carry

META = {
    "step": 4,
    "time": 1.7e9,
    "script": "train.py",
    "seed": 0,
    "size": 2,
    "commit_seconds": 1.0,
    "evil": "\x1b[31m\n",
}


@pytest.fixture
def directory(tmp_path):
    commits = CheckpointDirectory(tmp_path / "run", keep=5)
    for step in (2, 4):
        torch.manual_seed(step)
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
        model[1].weight = model[0].bias
        wrapped = {f"module.{name}": value for name, value in model.state_dict().items()}
        state = {"model": model.state_dict(), "wrapped": wrapped, "optimizer": {"state": {0: {"lr": 0.1}}}}
        commits.commit(carry.pack(state, {**META, "step": step}), step)
    return commits.directory


def run(verb, *arguments):
    command = {"checkpoints": checkpoints.command, "export": export.command}[verb]
    result = CliRunner().invoke(command, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result


def files(directory):
    return sorted(directory.glob("*.samestep"))


def damage(path):
    data = bytearray(path.read_bytes())
    data[-64] ^= 1
    path.write_bytes(data)


def test_checkpoints_are_listed_newest_first_with_what_made_them(directory):
    result = run("checkpoints", directory)
    assert result.exit_code == 0
    head, four, two = result.output.splitlines()
    assert head.split() == ["step", "committed", "size", "state", "from"]
    assert four.split()[0] == "4"
    assert "complete  script=train.py seed=0 ranks=2 evil=\\x1b[31m\\n" in four
    assert two.split()[0] == "2"


def test_verify_finds_the_damage_that_a_header_does_not_show(directory):
    damage(files(directory)[0])
    assert run("checkpoints", directory).exit_code == 0
    result = run("checkpoints", directory, "--verify")
    assert result.exit_code == 1
    assert "good   script=train.py" in result.output.splitlines()[1]
    assert "bad    has a damaged model.1.num_batches_tracked" in result.output.splitlines()[2]


def test_the_list_is_there_for_programs_too(directory):
    files(directory)[0].write_bytes(b"")
    (directory / "000009-step-9-00000000.samestep").symlink_to("/etc/passwd")
    result = run("checkpoints", directory, "--json")
    assert result.exit_code == 1
    rows = [json.loads(line) for line in result.output.splitlines()]
    assert [(row["step"], row["state"]) for row in rows] == [(9, "bad"), (4, "complete"), (2, "bad")]
    assert [row.get("why") for row in rows] == ["is a symbolic link", None, "is not a samestep checkpoint"]
    assert rows[1]["meta"] == META


def test_an_empty_directory_and_none_are_told_apart(tmp_path):
    result = run("checkpoints", tmp_path)
    assert (result.exit_code, result.output) == (0, f"no checkpoints in {tmp_path}\n")
    assert run("checkpoints", tmp_path / "none").exit_code == 2


def test_listing_and_verifying_import_no_torch(directory):
    program = f"""
import sys
from samestep.cli import main
try:
    main(["checkpoints", {str(directory)!r}, "--verify"])
except SystemExit as end:
    assert not end.code
assert "torch" not in sys.modules and "samestep.train" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
@pytest.mark.parametrize("part", ["model", "wrapped"])
def test_exported_weights_load_where_samestep_is_not(directory, tmp_path, part, suffix):
    output = tmp_path / f"weights.{suffix}"
    result = run("export", directory, "-o", output, "--part", part)
    assert result.exit_code == 0, result.output
    loaded = torch.load(output, weights_only=True) if suffix == "pt" else load_file(output)
    torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)).load_state_dict(loaded)
    newest = carry.read(files(directory)[1])[0]["model"]
    assert all(torch.equal(loaded[name], value) for name, value in newest.items())
    assert os.listdir(tmp_path) == ["run", output.name] or os.listdir(tmp_path) == [output.name, "run"]


def test_one_file_or_the_newest_good_one_is_exported(directory, tmp_path):
    two, four = files(directory)
    damage(four)
    for source in (two, directory):
        assert run("export", source, "-o", tmp_path / "w.pt", "--force").exit_code == 0
        weight = torch.load(tmp_path / "w.pt", weights_only=True)["0.weight"]
        assert torch.equal(weight, carry.read(two)[0]["model"]["0.weight"])
    result = run("export", four, "-o", tmp_path / "w.pt", "--force")
    assert result.exit_code == 1
    assert "has a damaged model.1.num_batches_tracked" in result.output


def test_export_replaces_nothing_unless_told_to(directory, tmp_path):
    output = tmp_path / "w.pt"
    output.write_text("mine")
    result = run("export", directory, "-o", output)
    assert (result.exit_code, output.read_text()) == (2, "mine")
    assert "exists; write --force to replace it" in result.output
    assert run("export", directory, "-o", output, "--force").exit_code == 0


def test_export_takes_a_file_of_plain_weights_as_it_is(tmp_path):
    torch.save({"module.w": torch.ones(2), "module.b": torch.zeros(1)}, tmp_path / "best.pt")
    result = run("export", tmp_path / "best.pt", "-o", tmp_path / "w.safetensors")
    assert result.exit_code == 0
    assert {key: value.tolist() for key, value in load_file(tmp_path / "w.safetensors").items()} == {
        "w": [1.0, 1.0],
        "b": [0.0],
    }
    result = run("export", tmp_path / "best.pt", "-o", tmp_path / "e.pt", "--part", "ema")
    assert (
        "ema is not in this checkpoint, which holds module.w, module.b; choose with --part" in result.output
    )


def test_export_of_what_is_not_there_is_a_mistake_of_the_command_line(tmp_path):
    result = run("export", tmp_path / "none", "-o", tmp_path / "w.pt")
    assert (result.exit_code, "none' does not exist" in result.output) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["-o", "w.onnx"], "w.onnx ends in neither .safetensors nor .pt; choose one of them"),
        (
            ["-o", "w.pt", "--part", "mdl"],
            "mdl is not in this checkpoint, which holds model, wrapped, optimizer; ",
        ),
        (
            ["-o", "w.safetensors", "--part", "optimizer"],
            "optimizer.state is a dict, and safetensors hold tensors",
        ),
        (["-o", "none/w.pt"], "none/w.pt cannot be written (No such file or directory)"),
    ],
)
def test_what_cannot_be_exported_is_said_and_leaves_nothing(
    directory, tmp_path, monkeypatch, arguments, sentence
):
    monkeypatch.chdir(tmp_path)
    result = run("export", directory, *arguments)
    assert result.exit_code in (1, 2)
    assert sentence in " ".join(result.output.split())
    assert os.listdir(tmp_path) == ["run"]
