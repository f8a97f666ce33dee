"""`samestep compare` answers with its exit code, its last line, and nothing but data on stdout."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn

from samestep.cli.compare import command

A, B, C = "a.pt", "b.pt", "c.pt"


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4))
    torch.save(net.state_dict(), A)
    torch.save({f"module.{name}": tensor for name, tensor in net.state_dict().items()}, C)
    with torch.no_grad():
        net(torch.randn(8, 1, 8, 8))
    torch.save(net.state_dict(), B)


def _compare(*arguments: str) -> Result:
    return CliRunner().invoke(command, arguments)


def _process(*arguments: str) -> "subprocess.CompletedProcess[str]":
    code = "from samestep.cli import main; main()"
    environment = os.environ | {"PYTHONWARNINGS": "error"}
    argv = [sys.executable, "-c", code, "compare", *arguments]
    return subprocess.run(argv, capture_output=True, text=True, env=environment, timeout=50)


@pytest.mark.parametrize(
    ("files", "code", "out", "err"),
    [
        ((A, C), 0, "same to the bit (7 tensors, 0.2 kB)\n", "names are compared without `module.`"),
        ((A, B), 1, "different: only BatchNorm statistics, 3 of 7 tensors", ""),
        ((A, "nowhere.pt"), 2, "", "nowhere.pt does not exist\n"),
    ],
)
def test_the_exit_code_says_whether_files_differ(
    files: tuple[str, ...], code: int, out: str, err: str
) -> None:
    result = _compare(*files)
    assert result.exit_code == code, result.stderr
    assert out in result.stdout
    assert err in result.stderr


def test_a_process_answers_without_colour_and_warnings() -> None:
    ended = _process(A, B)
    assert (ended.returncode, ended.stderr) == (1, "")
    assert "different: only BatchNorm statistics, 3 of 7 tensors" in ended.stdout
    assert "\x1b" not in ended.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["-h"], ""), (["nowhere.pt", "a.pt/b"], "samestep compare: a.pt/b does not exist")],
)
def test_help_and_what_is_not_there_do_not_import_torch(arguments: list[str], said: str) -> None:
    code = (
        "import sys; from samestep.cli.compare import command\n"
        f"try: command({arguments}, standalone_mode=False)\n"
        "except SystemExit: pass\n"
        "print('torch' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert ended.stdout.splitlines()[-1] == "False", ended.stderr
    assert said in ended.stderr


def test_the_last_line_is_the_verdict_and_the_table_fits_80_columns() -> None:
    lines = _compare(A, B).stdout.splitlines()
    assert lines[-1].startswith("different: only BatchNorm statistics")
    assert all(len(line) <= 80 for line in lines[:-1])
    assert any("Use replicate(model," in line for line in lines)


def test_a_narrow_terminal_gets_each_difference_in_lines_of_its_own() -> None:
    result = CliRunner(env={"COLUMNS": "40"}).invoke(command, [A, B])
    lines = result.stdout.splitlines()
    assert all(len(line) <= 40 for line in lines[:-1]), result.stdout
    at = lines.index("B against A 1.running_mean")
    assert lines[at + 1] == "  elements 4 of 4"


def test_of_many_files_the_last_line_names_those_that_differ_from_the_first() -> None:
    result = _compare(A, B, C, B)
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1] == "different from A: B, D"
    torch.save({"0.weight": torch.zeros(1)}, "d.pt")
    assert _compare(A, C, "d.pt").stdout.splitlines()[-1] == "different from A: C"
    equal = _compare(A, C, A)
    assert (equal.exit_code, equal.stdout.splitlines()[-1]) == (0, "all files are equal")


def test_of_many_files_that_differ_four_get_a_table() -> None:
    assert _compare(A, *[B] * 6).stdout.count("against A") == 4


def test_a_tolerance_decides_the_exit_code() -> None:
    torch.save({"w": torch.tensor([1.0, 2.0])}, "near-1.pt")
    torch.save({"w": torch.tensor([1.0, 2.000001])}, "near-2.pt")
    assert _compare("near-1.pt", "near-2.pt").exit_code == 1
    assert _compare("near-1.pt", "near-2.pt", "--tolerance", "1e-5").exit_code == 0
    assert _compare("near-1.pt", "near-2.pt", "--tolerance", "1e-8").exit_code == 1
    for nonsense in ("-1", "nan", "inf", "x"):
        assert _compare("near-1.pt", "near-2.pt", "--tolerance", nonsense).exit_code == 2


def test_the_twenty_largest_are_listed_and_all_on_request() -> None:
    torch.save({f"l{i}.w": torch.tensor(1.0) for i in range(25)}, "one.pt")
    torch.save({f"l{i}.w": torch.tensor(1.0 + i + 1) for i in range(25)}, "other.pt")
    short, long = (_compare("one.pt", "other.pt", *more).stdout for more in ((), ("--all",)))
    assert "and 5 smaller (--all lists them)" in short
    assert "l4.w " not in short
    assert "l4.w " in long


def test_what_one_file_lacks_is_listed_after_what_both_have() -> None:
    state = {"optimizer": {f"step{i}": torch.tensor(float(i)) for i in range(25)}, "w": torch.tensor(1.0)}
    torch.save(state, "full.pt")
    torch.save({"w": torch.tensor(2.0)}, "part.pt")
    table = _compare("full.pt", "part.pt").stdout.split("\n\n")[1].splitlines()
    assert table[1].split() == ["w", "1", "and", "2"]
    assert table[2].split()[0] == "optimizer.step0"


def test_json_is_one_object_with_every_difference() -> None:
    torch.save({"w": torch.tensor([float("nan"), 1.0])}, "nan.pt")
    torch.save({"w": torch.tensor([0.0, 1.0])}, "zero.pt")
    result = _compare("zero.pt", "nan.pt", "nan.pt", "--json")
    report = json.loads(result.stdout, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert (report["schema_version"], report["equal"]) == (1, False)
    assert report["comparisons"][0]["verdict"] == "different"
    (difference,) = report["comparisons"][0]["differences"]
    assert difference == {
        "layer": "",
        "name": "w",
        "kind": "value",
        "a": "float32[2]",
        "b": "float32[2]",
        "size": 2,
        "elements": 1,
        "absolute": None,
        "relative": None,
        "bits": 9,
        "nans": 1,
        "exact": False,
        "rounding": False,
    }


def test_every_unreadable_file_is_named_in_text_and_json() -> None:
    Path("torn.pt").write_bytes(Path(A).read_bytes()[:-30])
    Path("empty.pt").touch()
    result = _compare(A, "torn.pt", "empty.pt", "--json")
    assert result.exit_code == 2
    sentences = ["torn.pt is torn: its end is missing", "empty.pt is empty"]
    assert result.stderr.splitlines() == [f"samestep compare: {said}" for said in sentences]
    assert json.loads(result.stdout) == {"schema_version": 1, "errors": sentences}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_no_file_system_and_no_arithmetic_knows_gets_a_sentence_too() -> None:
    torch.save({"w": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])}, "nested.pt")
    for file, sentence in (
        ("a" * 5000, "cannot be read (File name too long)"),
        ("nested.pt", "nested.pt holds w as a nested tensor, which has no shape; save its parts"),
    ):
        result = _compare(A, file)
        assert (result.exit_code, result.stdout) == (2, ""), result.output
        assert result.stderr.endswith(f"{sentence}\n")


def test_what_only_its_keys_tell_apart_stands_in_the_table_by_them() -> None:
    torch.save({"a.b": 1, "a": {"b": 2}}, "one.pt")
    torch.save({"a.b": 1, "a": {"b": 3}}, "other.pt")
    assert _compare("one.pt", "one.pt").stdout.splitlines()[-1].startswith("same to the bit (0 tensors")
    result = _compare("one.pt", "other.pt")
    assert result.exit_code == 1
    assert any(line.split() == ["['a']['b']", "2", "and", "3"] for line in result.stdout.splitlines())


def test_one_file_has_nothing_to_be_compared_with() -> None:
    result = _compare(A)
    assert result.exit_code == 2
    assert "name two or more" in result.stderr


def test_colour_is_for_terminals_that_want_it() -> None:
    for variables, styled in (({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)):
        result = CliRunner(env={"TERM": "xterm"} | variables).invoke(command, [A, C], color=True)
        assert ("\x1b" in result.stdout) == styled
