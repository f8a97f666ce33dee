"""Type checkers infer from samestep's calls what a script gets, and see a mistyped option."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("script.py")
LINES = SCRIPT.read_text().splitlines()
WANTED = {at: line.split("  # ")[1] for at, line in enumerate(LINES, 1) if "  # " in line}


def said_by_mypy():
    told = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", SCRIPT], capture_output=True, text=True, check=False
    ).stdout
    found = re.findall(r":(\d+): (?:note: Revealed type is \"(.*)\"|error: (.*))", told)
    return {int(at): re.sub(r"\b[\w.]+\.(?=\w)", "", kind) or error for at, kind, error in found}


def said_by_pyright():
    told = subprocess.run(
        [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, SCRIPT],
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    found = json.loads(told[told.index("{") :])["generalDiagnostics"]
    return {
        entry["range"]["start"]["line"] + 1: re.sub(
            r'^Type of .* is "(.*)"$', r"\1", entry["message"], flags=re.S
        )
        for entry in found
    }


@pytest.mark.slow
@pytest.mark.parametrize("checker", ["mypy", *(["pyright"] if os.environ.get("LONG") else [])])
def test_a_type_checker_infers_what_a_script_gets(checker):
    said = said_by_mypy() if checker == "mypy" else said_by_pyright()
    assert said.keys() == WANTED.keys()
    for at, wanted in WANTED.items():
        # mypy words the error in its own way
        assert said[at] == wanted or (wanted.startswith("No parameter") and "shufle" in said[at]), LINES[
            at - 1
        ]
