"""`record DIRECTORY OPTIONS [-m] SCRIPT ARGS…`: runs a script as `python` would, and records it."""

import json
import runpy
import sys
from pathlib import Path

from samestep.verify.record.originals import import_originals
from samestep.verify.record.recorder import Recorder


def main() -> None:
    directory, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    is_module = sys.argv[3] == "-m"
    del sys.argv[: 3 + is_module]
    if options["untouched"]:
        import_originals(sys.argv[0])
    recorder = Recorder(directory, **options)
    recorder.begin()
    try:
        if is_module:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
            runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        recorder.finish()


if __name__ == "__main__":
    main()
