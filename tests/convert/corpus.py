"""Converts each serial script, runs it at 1, 2 and 3 processes with --same, and compares it with the untouched one.

`python corpus.py [NAME …]` prints a table; `make convert-corpus` runs all.
"""

import math
import re
import shutil
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from forked import Nest

from samestep.convert.convert import convert

HERE = Path(__file__).parent
SCRIPTS = {path.stem: path for path in sorted((HERE / "scripts").glob("*.py"))}
SCRIPTS |= {path.parent.name: path for path in sorted((HERE / "scripts").glob("*/train.py"))}
SIZES = (1, 2, 3)
_NUMBER = re.compile(r"-?\d+\.\d+(?:e[-+]?\d+)?|-?\d+(?:e[-+]?\d+)?|nan|inf")
# how a number was computed, which repr shows beside it
_TYPES = re.compile(r", grad_fn=<\w+>|np\.float\d+\((.*?)\)")
_RELATIVE = 2e-4


@dataclass
class Ran:
    """What a run printed and saved, or why it failed."""

    printed: str
    files: dict[str, Any]
    failure: str = ""


@dataclass
class Outcome:
    """A script's conversion: what it lists, and how each run differs from the untouched script."""

    name: str
    gaps: list[str]
    differences: dict[int, str] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        return not self.gaps

    @property
    def is_wrong(self) -> bool:
        """Whether it is said to be complete and is not."""
        return self.is_complete and any(self.differences.values())

    def __str__(self) -> str:
        runs = "; ".join(f"{size}: {found}" for size, found in self.differences.items() if found) or "same"
        state = "WRONG" if self.is_wrong else "complete" if self.is_complete else "incomplete"
        return "\n".join([f"{self.name:24} {state:10} {runs}", *(f"    {gap}" for gap in self.gaps)])


def tried(nest: Nest, name: str, home: Path) -> Outcome:
    """Convert a script, and run it and its conversion."""
    script = SCRIPTS[name]
    for place in ("serial", "parallel"):
        if script.parent == HERE / "scripts":
            (home / place).mkdir(parents=True)
            shutil.copy(script, home / place)
        else:
            shutil.copytree(script.parent, home / place)
    found = convert(home / "parallel" / script.name)
    for path, (_, after) in found.files.items():
        path.write_bytes(after)
    outcome = Outcome(name, [str(gap) for gap in found.gaps])
    serial = _run(nest, home / "serial" / script.name, 0, home / "run-0")
    assert not serial.failure, f"the untouched {name} failed:\n{serial.failure}"
    for size in SIZES if found.files else ():
        ran = _run(nest, home / "parallel" / script.name, size, home / f"run-{size}")
        outcome.differences[size] = difference(ran, serial)
        if ran.failure:
            break
    return outcome


def _run(nest: Nest, script: Path, size: int, home: Path) -> Ran:
    home.mkdir()
    ranks = nest.start(script, size, cwd=home, apart=True, env={"SAMESTEP_SAME": "1"})
    codes = nest.wait(ranks)
    if codes != [0] * len(ranks):
        for rank in ranks:
            rank.kill()
        nest.wait(ranks, 5)
        return Ran("", {}, "\n".join(rank.complained[-1500:] for rank in ranks))
    written = [path for path in sorted(home.rglob("*")) if path.suffix in (".pt", ".pth", ".ckpt", ".bin")]
    files = {str(path.relative_to(home)): torch.load(path, weights_only=False) for path in written}
    return Ran(ranks[0].said, files)


def difference(ran: Ran, serial: Ran) -> str:
    """How a run differs from the untouched script's, beyond rounding."""
    if ran.failure:
        return f"failed: {ran.failure.strip().splitlines()[-1][:160] if ran.failure.strip() else 'no end'}"
    pairs = zip(ran.printed.splitlines(), serial.printed.splitlines(), strict=False)
    for ours, theirs in pairs:
        if not _alike(ours, theirs):
            return f"prints `{ours.strip()}` for `{theirs.strip()}`"
    if len(ran.printed.splitlines()) != len(serial.printed.splitlines()):
        return "prints more or fewer lines"
    if ran.files.keys() != serial.files.keys():
        return f"writes {sorted(ran.files)} for {sorted(serial.files)}"
    for name, file in ran.files.items():
        if (apart := _apart(file, serial.files[name])) > 20 * _RELATIVE:
            return f"{name} differs by {apart:.1e}"
    return ""


def _alike(ours: str, theirs: str) -> bool:
    ours, theirs = (_TYPES.sub(r"\1", line) for line in (ours, theirs))
    if _NUMBER.sub("#", ours) != _NUMBER.sub("#", theirs):
        return False
    for a, b in zip(_NUMBER.findall(ours), _NUMBER.findall(theirs), strict=True):
        last_digit = 10.0 ** -len(b.partition("e")[0].partition(".")[2]) if "." in b else 0.0
        allowed = max(_RELATIVE * abs(float(b)), min(1.01 * last_digit, 0.011))
        # in this order, since `>` is False of nan, and beside inf every difference would be small
        if a != b and not abs(float(a) - float(b)) <= allowed < math.inf:
            return False
    return True


def _apart(ours: Any, theirs: Any) -> float:
    """The largest relative difference; infinite where they are not comparable, or one is not a number."""
    if isinstance(ours, torch.nn.Module):
        return _apart(ours.state_dict(), theirs.state_dict())
    if isinstance(ours, dict):
        are_alike = ours.keys() == theirs.keys()
        return max([0.0, *(_apart(ours[key], theirs[key]) for key in ours)]) if are_alike else math.inf
    if isinstance(ours, list | tuple):
        return max([0.0, *map(_apart, ours, theirs)]) if len(ours) == len(theirs) else math.inf
    if not isinstance(ours, torch.Tensor | float):
        return 0.0 if ours == theirs else math.inf
    ours, theirs = (torch.as_tensor(value, dtype=torch.float64) for value in (ours, theirs))
    if ours.shape != theirs.shape:
        return math.inf
    if torch.equal(ours, theirs):
        return 0.0
    return float(
        ((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-6)).nan_to_num(math.inf, math.inf)
    )


def main(names: list[str]) -> int:
    outcomes = []
    with tempfile.TemporaryDirectory() as place, Nest(Path(place)) as nest:
        for name in names or SCRIPTS:
            outcomes.append(tried(nest, name, Path(place) / name))
            print(outcomes[-1], flush=True)
    wrong = [outcome.name for outcome in outcomes if outcome.is_wrong]
    complete = sum(outcome.is_complete for outcome in outcomes)
    print(
        f"\n{complete} of {len(outcomes)} complete ({complete / len(outcomes):.0%}), silently wrong: {wrong or 'none'}"
    )
    return len(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
