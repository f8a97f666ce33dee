"""What samestep weighs: its distributions and bytes beside torch, the time of `--help` and of `import samestep`.

The distributions are those of its requirements without extras, less those that torch requires, and less numpy, which
torch's users have.
"""

import subprocess
import sys
import time
from collections.abc import Iterable
from importlib.metadata import distribution
from pathlib import Path
from statistics import median

from packaging.requirements import Requirement
from report import BIN, Rows, keep

TURNS = 40
SOURCE = Path(__file__).parents[1] / "src" / "samestep"
PYTHON = sys.executable
# What the start script does that uv installs. The one of pip also imports re, which takes longer than all of --help.
HELP = "from samestep.cli import main; main(['--help'])"
IMPORT = "import time; began = time.perf_counter(); import samestep; print(time.perf_counter() - began)"


def required(names: Iterable[str], known: set[str]) -> set[str]:
    """The distributions of these names and all that they require, without extras and without the known ones."""
    for name in set(names) - known:
        wanted = map(Requirement, distribution(name).requires or [])
        needed = {
            requirement.name.lower()
            for requirement in wanted
            if not requirement.marker or requirement.marker.evaluate({"extra": ""})
        }
        known = known | {name} | required(needed, known | {name})
    return known


def bytes_of(name: str) -> int:
    """What a distribution takes on the disk, without the bytecode that Python adds."""
    files = [file.locate() for file in distribution(name).files or [] if file.suffix != ".pyc"]
    return sum(file.stat().st_size for file in files if file.is_file())


def seconds(*command: str) -> float:
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def own_bytes() -> int:
    """samestep's own files; an editable installation lists only its path."""
    command = ["git", "ls-files", "--full-name"]
    listed = subprocess.run(command, cwd=SOURCE, capture_output=True, text=True, check=True).stdout
    return sum((SOURCE.parents[1] / line).stat().st_size for line in listed.splitlines())


def measured() -> Rows:
    """Each ratio is formed within one turn, in which both commands run."""
    torchs = required({"torch", "numpy"}, set())
    beside = sorted(required({"samestep"}, torchs) - torchs - {"samestep"})
    helps, by_pip, imports = [], [], []
    for _ in range(TURNS):
        bare = seconds(PYTHON, "-c", "pass")
        helps.append(seconds(PYTHON, "-c", HELP) / bare)
        by_pip.append(seconds(str(BIN / "samestep"), "--help") / bare)
        said = subprocess.run([PYTHON, "-c", IMPORT], capture_output=True, text=True, check=True).stdout
        imports.append(float(said))
    return [
        {"what": "distributions, its own included", "is": len(beside) + 1, "at most": 9},
        {
            "what": "MB on the disk",
            "is": round((own_bytes() + sum(map(bytes_of, beside))) / 1e6, 1),
            "at most": 10,
        },
        {"what": "samestep --help / python -c pass", "is": round(median(helps), 2), "at most": 1.5},
        {"what": "the same with pip's start script", "is": round(median(by_pip), 2)},
        {"what": "import samestep, ms, best", "is": round(1000 * min(imports), 1), "at most": 10},
        {"what": "which", "is": ["samestep", *beside]},
    ]


if __name__ == "__main__":
    keep(TURNS, measured())
