"""Runs the tests of training under other Pythons and torches than the pinned ones, each in a venv of its own.

The tests are those of the last commit, which is cloned.

`python versions.py` tries all pairs, `python versions.py 3.11/2.14.1` one, and each writes its row of the page
docs/versions.md. A venv takes about 6 GB while its tests run, since PyPI's torch is a CUDA build.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "docs" / "versions.md"
PAIRS = (
    "3.11/2.11.0",
    "3.11/2.12.1",
    "3.11/2.13.0",
    "3.11/2.14.1",
    "3.11/2.15.0",
    "3.12/2.13.0",
    "3.13/2.14.1",
)
TESTS = ("tests/train", "tests/same", "tests/state", "tests/start/test_spawn.py", "tests/cli/test_run.py")
# What each torch brings itself, in the versions that it asks for.
_TORCHS_OWN = re.compile("(torch|triton|nvidia|sympy|setuptools)")
_MANAGED = Path.home() / ".pyenv" / "versions"


def main(pairs: list[str]) -> None:
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True).strip()
    failed = False
    for pair in pairs or PAIRS:
        outcome = _tried(*pair.split("/"))
        failed |= bool(re.search("failed|error", outcome))
        print(f"{pair}: {outcome}", flush=True)
        TABLE.write_text(_page(_rows() | {pair: (commit, outcome)}))
    sys.exit(failed)


def _rows() -> dict[str, tuple[str, str]]:
    """The commit and the outcome of each pair on the page."""
    page = TABLE.read_text() if TABLE.exists() else ""
    found = re.findall(r"^\| (3\.\d+) \| ([\d.]+) \| (.*) \| (.*) \|$", page, re.MULTILINE)
    return {f"{python}/{torch}": (commit, outcome) for python, torch, commit, outcome in found}


def _tried(python: str, torch: str) -> str:
    """What came out: how many tests passed and failed, or why none could run."""
    found = _python(python)
    if found is None:
        return "not tried: there is no such Python here"
    with tempfile.TemporaryDirectory(prefix="samestep-versions-") as folder:
        venv, tree = Path(folder, "venv"), Path(folder, "tree")
        subprocess.run(["git", "clone", "--quiet", ROOT, tree], check=True)
        subprocess.run([found, "-m", "venv", venv], check=True)
        if said := _install(venv / "bin" / "python", torch, tree):
            return f"not tried: {said}"
        command = [venv / "bin" / "python", "-m", "pytest", "-n", "2", *TESTS]
        env = os.environ | {"PATH": f"{venv / 'bin'}:{os.environ['PATH']}"}
        done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)
    for line in done.stdout.splitlines():
        if line.startswith(("FAILED", "ERROR")):
            print(f"  {line}", flush=True)
    counted = re.findall(r"\d+ (?:passed|failed|errors?)\b", done.stdout[-500:])
    return ", ".join(counted) or f"failed before its end: {(done.stdout + done.stderr).strip()[-200:]}"


def _install(python: Path, torch: str, tree: Path) -> str | None:
    """Install this torch and the other pinned packages; returns what hinders it."""
    constraints = tree / "constraints.txt"
    pinned = [line for line in constraints.read_text().splitlines() if not _TORCHS_OWN.match(line)]
    constraints.write_text("\n".join(pinned))
    command = [python, "-m", "pip", "install", "--quiet", "--no-cache-dir", f"torch=={torch}", "setuptools"]
    done = subprocess.run(
        [*command, "-e", f"{tree}[dev]"],
        env=os.environ | {"PIP_CONSTRAINT": str(constraints), "PIP_ROOT_USER_ACTION": "ignore"},
        capture_output=True,
        text=True,
    )
    return done.stderr.strip().splitlines()[-1] if done.returncode else None


def _python(version: str) -> str | None:
    managed = sorted(_MANAGED.glob(f"{version}.*/bin/python"))
    return str(managed[-1]) if managed else shutil.which(f"python{version}")


def _page(rows: dict[str, tuple[str, str]]) -> str:
    lines = [
        f"| {' | '.join(pair.split('/'))} | {commit} | {outcome} |"
        for pair, (commit, outcome) in rows.items()
    ]
    return "\n".join(
        [
            "# Which versions of Python and torch work?",
            "",
            "Python 3.11 and torch 2.11 are the oldest ones. `make versions` installs each pair in an environment",
            "of its own and runs the tests of training, states and starting there, on CPU cores. The results:",
            "",
            "| Python | torch | commit | tests |",
            "|---|---|---|---|",
            *lines,
            "",
        ]
    )


if __name__ == "__main__":
    main(sys.argv[1:])
