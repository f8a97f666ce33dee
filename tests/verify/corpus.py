"""Runs `verify` on the scripts of tests/scripts, in forked processes, and compares with what each script declares.

A script declares in its docstring what verify has to say of it: `verdict: NAME`, and a line `cause: WORDS` for each
cause, with words of its sentence; likewise `printed: WORDS` and `remark: WORDS`. A cause, a finding or a remark that no
line declares is an objection too. `sizes: 1,2` and `args: …` say how the script is run.
"""

import ast
import json
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from forked import Nest, Rank

from samestep.errors import UsageError
from samestep.measure.runs import End, Run
from samestep.measure.trial import Result, Trial
from samestep.verify import record
from samestep.verify.verify import Report, verify

HOME = Path(__file__).parents[1] / "scripts"
_RECORD = Path(record.__file__).parent / "__main__.py"
_LIMIT_S = 100.0
_KINDS = ("cause", "printed", "remark")


@dataclass
class Expected:
    """What a script declares."""

    verdict: str = "same"
    cause: list[str] = field(default_factory=list)
    printed: list[str] = field(default_factory=list)
    remark: list[str] = field(default_factory=list)
    sizes: str = "1,2,3"
    args: str = ""


def expected(script: Path) -> Expected:
    """What is declared in the docstring of a script."""
    found = Expected()
    for line in (ast.get_docstring(ast.parse(script.read_text())) or "").splitlines():
        name, _, value = line.strip().partition(": ")
        if name in _KINDS:
            getattr(found, name).append(value)
        elif name in ("verdict", "sizes", "args"):
            setattr(found, name, value)
    return found


class Forked:
    """Runs trials in processes forked from one that has torch."""

    def __init__(self, nest: Nest) -> None:
        self._nest = nest

    def __call__(self, trial: Trial) -> Result:
        began = time.monotonic()
        _, *options = trial.through
        home = trial.directory / "here"
        home.mkdir()
        ranks = self._nest.start(
            _RECORD, trial.size, *options, *trial.script, env={"FRESH_STREAMS": "1", **trial.env}, cwd=home
        )
        code, text = self._end(ranks, began)
        seconds = time.monotonic() - began
        ended = End(code, seconds, text if code else None)
        return Result(code, seconds, text, Run(home, [], trial.size, "", 0, 0.0, "", ended, {}, (), 0.0))

    def _end(self, ranks: list[Rank], began: float) -> tuple[int, str]:
        while all(rank.code in (None, 0) for rank in ranks) and any(rank.code is None for rank in ranks):
            self._nest.look(0.05)
            if time.monotonic() - began > _LIMIT_S:
                break
        until = time.monotonic() + 2
        while any(rank.code is None for rank in ranks) and time.monotonic() < until:
            self._nest.look(0.05)
        for rank in ranks:
            rank.kill(signal.SIGKILL)
        while any(rank.code is None for rank in ranks):
            self._nest.look(0.05)
        # a rank that fails as another did may end first, and does not say why
        failed = [rank for rank in ranks if rank.code]
        failed.sort(key=lambda rank: (" failed as rank " in rank.said, rank.ended_at))
        return (failed[0].code or 1, failed[0].said) if failed else (0, ranks[0].said)


def verified(script: Path, nest: Nest) -> Report | str:
    """The report of a script, or why it cannot be verified."""
    asked = expected(script)
    sizes = [int(size) for size in asked.sizes.split(",")]
    try:
        return verify([str(script), *asked.args.split()], sizes, run=Forked(nest))
    except UsageError as error:
        return str(error)


def objections(script: Path, report: Report | str) -> list[str]:
    """How a report is not what the script declares."""
    asked = expected(script)
    if isinstance(report, str):
        return (
            [] if asked.verdict == "refused" and all(phrase in report for phrase in asked.cause) else [report]
        )
    verdict = "same" if report.verdict in ("bits", "rounding") else report.verdict
    found: list[str] = [] if verdict == asked.verdict else [f"{verdict}, not {asked.verdict}"]
    causes = [cause.sentence for cause in report.causes if not cause.is_harmless]
    shown = {
        "cause": causes,
        "printed": [str(finding) for finding in report.findings],
        "remark": report.remarks,
    }
    for kind, sentences in shown.items():
        words = getattr(asked, kind)
        found += [
            f"no {kind} {phrase!r}" for phrase in words if not any(phrase in said for said in sentences)
        ]
        found += [f"{kind} {said!r}" for said in sentences if not any(phrase in said for phrase in words)]
    return found


def main(names: list[str]) -> int:
    scripts = [HOME / f"{name}.py" for name in names] or sorted(HOME.glob("*.py"))
    wrong = 0
    with tempfile.TemporaryDirectory() as home, ThreadPoolExecutor(1) as pool, Nest(Path(home)) as nest:
        tempfile.tempdir = home  # a failure's logs are kept there

        def judged(script: Path) -> tuple[Path, Any, list[str], float]:
            began = time.monotonic()
            report = verified(script, nest)
            return script, report, objections(script, report), time.monotonic() - began

        for script, report, objected, seconds in pool.map(judged, scripts):
            wrong += bool(objected)
            print(
                f"{'WRONG' if objected else 'right'}  {script.stem:32}  {seconds:5.1f} s  {'; '.join(objected)}"
            )
            if objected or names:
                print("   ", "\n    ".join([report] if isinstance(report, str) else report.lines), flush=True)
    print(json.dumps({"scripts": len(scripts), "wrong": wrong}))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
