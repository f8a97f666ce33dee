"""Five serial scripts made parallel by samestep, Accelerate and Fabric: lines changed, and what two processes print.

The serial scripts are of tests/convert/scripts. samestep's versions are what `samestep convert` writes, those of the
peers are patches in scripts/lines, written as their own pages say: the batch of a step stays, totals are reduced over
the ranks, rank 0 prints and saves.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from peers import HERE_2, TORCHRUN, changed
from report import BIN, Rows, keep

from samestep.convert.convert import convert

TESTS = Path(__file__).parents[1] / "tests" / "convert"
PATCHES = Path(__file__).parent / "scripts" / "lines"
sys.path[:0] = [str(TESTS), str(TESTS.parent)]
from corpus import Ran, difference  # noqa: E402

SYSTEMS = {
    "samestep": [str(BIN / "samestep"), "run", "--same", "-n", "2"],
    "accelerate": [*TORCHRUN, *HERE_2],
    "fabric": [*TORCHRUN, *HERE_2],
}


def run(command: list[str], script: Path) -> Ran:
    """One run in the script's own directory."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    env |= {"SAMESTEP_METER": "0"}
    done = subprocess.run(
        [*command, script.name], cwd=script.parent, env=env, capture_output=True, text=True, timeout=180
    )
    # torch ends some processes of Accelerate by SIGABRT after the script's last line: what they made counts
    saved = [path for path in sorted(script.parent.iterdir()) if path.suffix in (".pt", ".pth", ".ckpt")]
    files = {path.name: torch.load(path, weights_only=True) for path in saved}
    return Ran(done.stdout, files, "" if files else done.stderr)


def written(name: str, system: str, folder: Path) -> Path:
    """The script as it is for this system, in a directory of its own."""
    script = folder / system / f"{name}.py"
    script.parent.mkdir(parents=True)
    shutil.copy(TESTS / "scripts" / script.name, script)
    if system == "samestep":
        ((_, after),) = convert(script).files.values()
        script.write_bytes(after)
    elif system != "serial":
        subprocess.run(["git", "apply", PATCHES / f"{name}.{system}.patch"], cwd=script.parent, check=True)
    return script


def main() -> None:
    rows: Rows = []
    print("script            system        lines  two processes beside the serial script")
    with tempfile.TemporaryDirectory() as folder:
        for name in sorted({path.name.partition(".")[0] for path in PATCHES.glob("*.patch")}):
            serial = written(name, "serial", Path(folder, name))
            expected = run([sys.executable], serial)
            for system, command in SYSTEMS.items():
                script = written(name, system, Path(folder, name))
                found = difference(run(command, script), expected) or "the same"
                count = changed(serial, script)
                rows.append({"script": name, "system": system, "lines": count, "difference": found})
                print(f"{name:17} {system:11} {count:>8}  {found}", flush=True)
    keep(1, rows)


if __name__ == "__main__":
    main()
