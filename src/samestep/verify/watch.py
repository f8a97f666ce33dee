"""Runs a script as `python` would, and has what its steps are made of written into $SAMESTEP_RECORD."""

import os
import runpy
import sys
from pathlib import Path

from samestep.verify.record import Recorder


def main() -> None:
    """`watch [-m] SCRIPT ARGS…`."""
    is_module = sys.argv[1] == "-m"
    del sys.argv[: 2 if is_module else 1]
    script = sys.argv[0]
    most, nudge = os.environ.get("SAMESTEP_RECORD_STEPS"), os.environ.get("SAMESTEP_RECORD_NUDGE")
    recorder = Recorder(Path(os.environ["SAMESTEP_RECORD"]), int(most) if most else None, bool(nudge))
    recorder.begin()
    try:
        if is_module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(script).resolve().parent)
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        recorder.finish()
        raise end
    recorder.finish()


if __name__ == "__main__":
    main()
