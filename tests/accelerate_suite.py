"""Runs the test scripts that accelerate ships under `samestep run` and under torchrun, and compares how they end.

`python accelerate_suite.py` runs each on two processes and writes the table tests/accelerate_suite.md. It needs the
extra `bench`.
"""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__)
TABLE = HERE.with_suffix(".md")
BIN = Path(sys.executable).parent
_SECONDS = 100
_SCRIPTS = ("test_cli", "test_ops", "test_sync", "test_script", "test_distributed_data_loop")
_HEAD = """\
# accelerate's own test scripts under `samestep run` and torchrun

`make torch-suite` runs the scripts of `accelerate.test_utils` on two processes with Gloo on CPU, and writes this table.
"""


def scripts() -> list[Path]:
    """The scripts that need nothing but accelerate and torch."""
    import accelerate.test_utils

    place = Path(accelerate.test_utils.__file__).parent / "scripts"
    return [place / f"{name}.py" for name in _SCRIPTS]


def ended(command: list[str]) -> tuple[int | None, str]:
    """The exit code of a command, and the first line of its errors if it failed."""
    env = {**os.environ, "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        return None, "did not end in time"
    errors = [line for line in done.stderr.splitlines() if "Error" in line]
    return done.returncode, errors[0].strip()[:120] if errors and done.returncode else ""


def main(names: list[str]) -> int:
    rows = []
    known = {script.stem: script for script in scripts()}
    for script in [known[name] for name in names or known]:
        ways = [
            [str(BIN / "samestep"), "run", "-n", "2", str(script)],
            [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2", str(script)],
        ]
        found = [ended(command) for command in ways]
        codes = [code for code, _ in found]
        alike = "yes" if (codes[0] == 0) == (codes[1] == 0) else "NO"
        why = " · ".join(dict.fromkeys(why for _, why in found if why))
        rows.append(f"| `{script.name}` | {codes[0]} | {codes[1]} | {alike} | {why.replace('|', '/')} |")
        print(rows[-1], flush=True)
    if not names:
        lines = [
            "| script | samestep run: exit code | torchrun: exit code | alike | error |",
            "|---|---|---|---|---|",
        ]
        TABLE.write_text(_HEAD + "\n" + "\n".join([*lines, *rows]) + "\n")
    return sum("| NO |" in row for row in rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) > 0)
