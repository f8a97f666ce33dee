"""The command and the import are there at once: neither waits for torch."""

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import pytest

import samestep
from samestep import cli

COMMAND = str(Path(sys.executable).with_name("samestep"))
SCRIPT = str(Path(__file__).parents[1] / "bin" / "samestep")
LOADED = "; import sys; print(*sorted({name.partition('.')[0] for name in sys.modules}))"


def modules_after(code: str) -> set[str]:
    ran = subprocess.run([sys.executable, "-c", code + LOADED], capture_output=True, text=True, check=True)
    return set(ran.stdout.splitlines()[-1].split())


def seconds(command: Sequence[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def test_importing_samestep_imports_nothing_else():
    assert modules_after("import samestep") - modules_after("pass") == {"samestep"}


def test_help_imports_neither_torch_nor_click():
    assert not {"torch", "click"} & modules_after("from samestep.cli import main; main(['--help'])")


@pytest.mark.parametrize("verb", [verb for group in cli._VERBS.values() for verb in group])
def test_no_verb_imports_torch_to_explain_itself(verb):
    code = f"from samestep.cli.{verb} import command; command(['--help'], standalone_mode=False)"
    assert "torch" not in modules_after(code)


def test_the_command_imports_nothing_to_show_help_that_python_itself_has_not():
    assert imported(SCRIPT, "--help") - imported("-c", "pass") == {"samestep", "samestep.cli"}


def imported(*words: str) -> set[str]:
    """The modules that Python imports for these words."""
    timed = subprocess.run(
        [sys.executable, "-X", "importtime", *words], capture_output=True, text=True, check=True
    )
    return {line.rpartition("|")[2].strip() for line in timed.stderr.splitlines()}


def test_help_takes_at_most_twice_as_long_as_python_itself():
    python = [sys.executable, "-c", "pass"]
    pairs = [(seconds([sys.executable, SCRIPT, "--help"]), seconds(python)) for _ in range(21)]
    assert median(command / python for command, python in pairs) <= 2


def test_help_shows_an_example_first_and_fits_a_terminal():
    lines = subprocess.check_output([COMMAND, "--help"], text=True).splitlines()
    assert lines[0].split()[0] == "samestep"
    assert len(lines) <= 30
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize("command", [[COMMAND], [sys.executable, "-m", "samestep"]])
def test_both_ways_to_ask_for_the_version_print_it(command):
    for word in ("--version", "version"):
        assert subprocess.check_output([*command, word], text=True) == f"samestep {samestep.__version__}\n"


def test_help_of_a_command_is_asked_for_in_both_ways():
    ways = [[COMMAND, "help", "logs"], [COMMAND, "logs", "--help"]]
    assert len({subprocess.check_output(way) for way in ways}) == 1
    assert subprocess.check_output([COMMAND, "help"]) == subprocess.check_output([COMMAND, "--help"])


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("rnu", "samestep has no command 'rnu'; did you mean `samestep run`?\n"),
        ("zip", "samestep has no command 'zip'; see `samestep --help`\n"),
        ("launch", "samestep has no command 'launch'; it is `samestep run` here\n"),
        ("ls", "samestep has no command 'ls'; it is `samestep runs` here\n"),
        ("-n2", "samestep has no command '-n2'; `samestep run -n2` runs a script\n"),
        ("train.py", "samestep has no command 'train.py'; `samestep run train.py` runs a script\n"),
    ],
)
def test_a_word_that_is_no_command_is_answered_with_what_to_write(word, answer):
    said = subprocess.run([COMMAND, word], capture_output=True, text=True)
    assert (said.returncode, said.stdout, said.stderr) == (2, "", answer)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"^module 'samestep' has no attribute 'sun'$"):
        _ = samestep.sun
    with pytest.raises(ImportError, match="cannot import name 'sun'"):
        from samestep import sun  # noqa: F401
