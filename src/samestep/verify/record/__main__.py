"""`record DIRECTORY [OPTIONS] -- [-m] SCRIPT ARGS…`: runs a script as `python` would, and records it."""

import argparse
import runpy
import sys
from pathlib import Path

from samestep.verify.record.recorder import Recorder
from samestep.verify.record.remove import Removed


def main() -> None:
    parser = argparse.ArgumentParser(prog="record")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--timeout", type=float)
    parser.add_argument("--nudge", action="store_true")
    parser.add_argument("--untouched", action="store_true")
    parser.add_argument("--without", action="append", default=[])
    end = sys.argv.index("--")
    asked = parser.parse_args(sys.argv[1:end])
    is_module = sys.argv[end + 1] == "-m"
    del sys.argv[: end + 1 + is_module]
    script = sys.argv[0]
    recorder = Recorder(
        asked.directory,
        Removed(asked.without),
        asked.steps,
        asked.timeout,
        nudge=asked.nudge,
        untouched=asked.untouched,
    )
    recorder.begin()
    try:
        if is_module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(script).resolve().parent)
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end_of_script:
        recorder.finish()
        raise end_of_script
    except BaseException:
        recorder.finish(failed=True)
        raise
    recorder.finish()


if __name__ == "__main__":
    main()
