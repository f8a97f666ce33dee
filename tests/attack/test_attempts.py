"""The attempts of this folder are counted, and one that succeeds is seen."""

import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).with_name("conftest.py")
ATTACKS = """
def test_two(attempt):
    attempt("one")
    attempt("two")

def test_succeeds(attempt):
    attempt("three")
    attempt("four")
    assert False
    attempt("five")

def test_none():
    pass
"""


@pytest.mark.parametrize("processes", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_attempts_and_successes_are_counted_also_over_several_processes(tmp_path, processes):
    (tmp_path / "conftest.py").write_bytes(CONFTEST.read_bytes())
    (tmp_path / "test_some.py").write_text(ATTACKS)
    words = [sys.executable, "-m", "pytest", "-n", str(processes), "-p", "no:cacheprovider", tmp_path]
    ran = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)
    assert ran.returncode == 1
    assert "attempts 4 | succeeded 1" in ran.stdout
