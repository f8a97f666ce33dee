"""The scripts of tests/same on this device at 1, 2 and 3 processes: the untouched script's numbers, or a remark."""

import os
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))
from forked import Nest  # noqa: E402
from same import corpus  # noqa: E402

ENV = {"SAMESTEP_BACKEND": "gloo", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
TOLERANCE = {"amp": 1e-2}


def judged(name):
    """What came of a script, in words that begin with `equal`, `said`, `refused` or what is wrong."""
    with tempfile.TemporaryDirectory() as home, Nest(Path(home)) as nest:

        def ran(size):
            by = Path(__file__).with_name("on_device.py")
            return corpus.run(nest, corpus.SCRIPTS[name], size, Path(home, f"at-{size}"), by, ENV)

        try:
            serial = ran(0)
        except AssertionError as error:  # as torch refuses random_split with a default device
            return f"refused: the untouched script fails with {str(error).strip().splitlines()[-1]}"
        try:
            alone, *others = map(ran, (1, 2, 3))
        except AssertionError as error:
            return f"failed: {str(error)[-1500:]}"
    apart = [run.difference(serial) for run in (alone, *others)]
    bits = "to the bit" if alone.has_bits_of(serial) else f"at 1 {apart[0]:.1e}"
    if max(apart) <= TOLERANCE.get(name, 1e-6):
        return f"equal {bits}"
    far = ", ".join(f"{distance:.1e}" for distance in apart)
    said = {
        line
        for run in others
        for line in run.complained.splitlines()
        if "serial script" in line or "statistics" in line
    }
    return (
        f"said at {far}: {' | '.join(sorted(said))}" if said and apart[0] <= 1e-6 else f"wrong: apart {far}"
    )


names = sys.argv[1:] or [*corpus.SCRIPTS]
with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as pool:
    found = dict(zip(names, pool.map(judged, names), strict=True))
for name, outcome in found.items():
    if not outcome.startswith("equal"):
        print(f"{name}: {outcome}")
kinds = Counter(outcome.partition(":")[0].partition(" ")[0] for outcome in found.values())
to_the_bit = sum("to the bit" in outcome for outcome in found.values())
print(f"{kinds['equal']} of {len(found)} scripts equal at 1, 2 and 3 processes, {to_the_bit} to the bit at 1")
print(f"{kinds['said']} are said to differ, {kinds['refused']} do not run untouched on this device")
sys.exit(bool(kinds["failed"] + kinds["wrong"]))
