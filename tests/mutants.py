"""Changes the source in one place at a time and sees whether a test beside it fails: python tests/mutants.py

Each change is made in a copy of the tree. The test file or folder that mirrors the changed file runs there, fast tests
first, in a fork of this process, which has torch and pytest. Where they all pass, the tests of the larger folders run.
A mutant ends with the first failure, or with a hang.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from edits import Edit, edits

ROOT = Path(__file__).parents[1]
PACKAGE = Path("src", "samestep")
EQUIVALENT = Path(__file__).with_name("mutants_equivalent.txt")
# The folders of tests that run the code of a folder.
_AROUND = {
    "state": (Path("tests", "state"), Path("tests", "train", "checkpoint")),
    "train": (Path("tests", "train"), Path("tests", "same")),
}
_COPIED = ("src", "tests", "examples", "pyproject.toml", "README.md")
_MARK = "STARTED_FOR_A_MUTANT"
_SLOWEST_S = (0.05, 0.3, 1.5)
_COLLECT_S = 10.0


class Order:
    """A plugin: takes the fast tests first, keeps the order of equally fast ones, and notes how long each took."""

    def __init__(self, seconds: dict[str, float], left_out: Iterable[str]) -> None:
        self.seconds, self.left_out = seconds, set(left_out)
        self.took: dict[str, float] = {}
        self.failed: list[str] = []

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid not in self.left_out]
        items.sort(key=lambda item: sum(self.seconds.get(item.nodeid, 0.0) > limit for limit in _SLOWEST_S))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # What a session fixture took to set up belongs to no test.
        if report.when == "call":
            self.took[report.nodeid] = report.duration
        if report.failed:
            self.failed.append(report.nodeid)


Suite = tuple[Path, ...]


@dataclass
class Known:
    """What the unchanged source showed about some tests."""

    seconds: dict[str, float]
    left_out: list[str]
    wall_s: float

    def part(self, suite: Suite) -> "Known":
        """What is known of the tests of one suite."""
        seconds = {
            name: took for name, took in self.seconds.items() if name.startswith(tuple(map(str, suite)))
        }
        return Known(seconds, self.left_out, _COLLECT_S + sum(seconds.values()))


class Tree:
    """A copy of the project in which one pytest runs at a time."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.pid = 0
        self.until = 0.0
        for name in _COPIED:
            take = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            take(ROOT / name, home / name)

    def start(self, suite: Suite, known: Known | None, limit_s: float) -> None:
        """Run the tests in a fork; without `known` all of them, to learn how long each takes and which fail."""
        self.until = time.monotonic() + limit_s
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            code = 99
            try:
                code = self._test(suite, known)
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            os._exit(code)

    def _test(self, suite: Suite, known: Known | None) -> int:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.chdir(self.home)
        sys.path[0] = str(self.home / "src")
        os.environ |= {"PYTHONPATH": sys.path[0], "PYTHONDONTWRITEBYTECODE": "1", _MARK: str(self.home)}
        os.environ.pop("STARTED_BY_TESTS", None)
        sys.dont_write_bytecode = True
        with (self.home / "said").open("w") as said:
            for number in (1, 2):
                os.dup2(said.fileno(), number)
        order = Order(known.seconds if known else {}, known.left_out if known else ())
        stop = ["-x"] if known else []
        began = time.monotonic()
        preloaded = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
        code = pytest.main([*map(str, suite), "-p", "no:cacheprovider", *preloaded, *stop], plugins=[order])
        learnt = {"seconds": order.took, "left_out": order.failed, "wall_s": time.monotonic() - began}
        (self.home / "learnt").write_text(json.dumps(learnt))
        return int(code)

    def ended(self) -> str | None:
        """How the tests ended, once they have: passed, failed or timed out."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        late = not pid and time.monotonic() > self.until
        if not pid and not late:
            return None
        if late:
            os.killpg(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        self._kill_what_is_left()
        self.pid = 0
        return "timed out" if late else "failed" if os.waitstatus_to_exitcode(status) else "passed"

    def _kill_what_is_left(self) -> None:
        for process in psutil.process_iter(["environ"]):
            if (process.info["environ"] or {}).get(_MARK) == str(self.home):
                process.kill()

    def close(self) -> None:
        if self.pid:
            os.killpg(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self._kill_what_is_left()

    def learnt(self) -> Known:
        return Known(**json.loads((self.home / "learnt").read_text()))


def suites_of(path: Path) -> list[Suite]:
    """The test file that mirrors a source file, or else its folder if that has no folders; then those of _AROUND."""
    inner = path.relative_to(PACKAGE)
    folder = Path("tests") / inner.parent
    named, around = folder / f"test_{path.stem}.py", _AROUND[inner.parts[0]]
    if (ROOT / named).exists():
        return [(named,), around]
    return [around] if list((ROOT / folder).glob("*/test_*.py")) else [(folder,), around]


def equivalents() -> dict[tuple[str, str, str], str]:
    """The changes that change nothing, by file, removed line and added line, with the reason."""
    if not EQUIVALENT.exists():
        return {}
    stanzas = [stanza.splitlines() for stanza in EQUIVALENT.read_text().strip().split("\n\n")]
    return {
        (path, removed.removeprefix("- "), added.removeprefix("+ ")): " ".join(reason)
        for path, removed, added, *reason in stanzas
    }


def learn(trees: Sequence[Tree], suites: Iterable[Suite], limit_s: float) -> dict[Suite, Known]:
    """Run the tests on the unchanged source."""
    known = {}
    for suite in sorted(suites):
        trees[0].start(suite, None, limit_s)
        while (end := trees[0].ended()) is None:
            time.sleep(0.05)
        if end == "timed out" or not (trees[0].home / "learnt").exists():
            said = (trees[0].home / "said").read_text()
            raise SystemExit(f"{_words(suite)}: the tests of the unchanged source did not end\n{said}")
        known[suite] = trees[0].learnt()
        print(
            f"{_words(suite)}: {len(known[suite].seconds)} tests in {known[suite].wall_s:.0f} s", flush=True
        )
        for name in known[suite].left_out:
            print(f"  left out, it fails on the unchanged source: {name}", flush=True)
    return known


def try_all(
    trees: Sequence[Tree], chosen: Sequence[Edit], known: dict[Suite, Known]
) -> list[tuple[Edit, str]]:
    """Each mutant with how it ended, as they end."""
    waiting, ends = [(edit, suites_of(edit.path)) for edit in reversed(chosen)], []
    running: dict[int, tuple[Edit, list[Suite]]] = {}
    while waiting or running:
        for number, tree in enumerate(trees):
            if number in running and (end := tree.ended()):
                edit, others = running.pop(number)
                shutil.copy(ROOT / edit.path, tree.home / edit.path)
                if end == "passed" and others:
                    waiting.insert(0, (edit, others))
                else:
                    ends.append((edit, end))
                    print({"passed": "S", "failed": ".", "timed out": "t"}[end], end="", flush=True)
            if number not in running and waiting:
                edit, (suite, *others) = waiting.pop()
                running[number] = edit, others
                (tree.home / edit.path).write_text(edit.source)
                for cached in (tree.home / edit.path).parent.glob(f"__pycache__/{edit.path.stem}.*"):
                    cached.unlink()
                part = known[suites_of(edit.path)[-1]].part(suite)
                tree.start(suite, part, 20 + 3 * part.wall_s)
        time.sleep(0.02)
    print()
    return ends


def _words(suite: Suite) -> str:
    return " ".join(map(str, suite))


def preload() -> None:
    """What every fork would import: all but samestep itself, which differs in each."""
    import hypothesis
    import torch
    import torch._dynamo
    import torch.distributed
    import torch.nn.parallel

    torch.set_num_threads(1)
    assert hypothesis
    assert not any(name.partition(".")[0] == "samestep" for name in sys.modules)


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    asked.add_argument("--path", nargs="+", default=["src/samestep/state", "src/samestep/train"])
    asked.add_argument("--count", type=int, default=200)
    asked.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10_000))
    asked.add_argument("--jobs", type=int, default=2)
    args = asked.parse_args()
    named = [ROOT / path for path in args.path]
    files = [
        file for path in named for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path.resolve()])
    ]
    every = [edit for file in files for edit in edits(file.relative_to(ROOT), file.read_text())]
    chosen = random.Random(args.seed).sample(every, min(args.count, len(every)))
    alike = equivalents()
    tried = [edit for edit in chosen if (str(edit.path), edit.removed, edit.added) not in alike]
    print(
        f"seed {args.seed}: {len(chosen)} of {len(every)} mutants, {len(chosen) - len(tried)} known as equivalent"
    )
    possible = {(str(edit.path), edit.removed, edit.added) for edit in every}
    for path, removed, _ in sorted(alike.keys() - possible):
        if path in {str(edit.path) for edit in every}:
            print(f"no edit any more, take it out of {EQUIVALENT.name}: {path}: {removed}")
    preload()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutants-") as base:
        trees = [Tree(Path(base, str(number))) for number in range(args.jobs)]
        try:
            known = learn(trees, {suites_of(edit.path)[-1] for edit in tried}, 900)
            ends = try_all(trees, tried, known)
        finally:
            for tree in trees:
                tree.close()
    count = {end: sum(found == end for _, found in ends) for end in ("failed", "timed out", "passed")}
    minutes = (time.monotonic() - began) / 60
    for edit, end in ends:
        if end == "passed":
            print(f"\n{edit}")
    print(
        f"\nkilled {count['failed'] + count['timed out']} (of these timed out: {count['timed out']}), "
        f"survived {count['passed']}, in {minutes:.1f} min"
    )
    return int(count["passed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
