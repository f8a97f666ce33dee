"""`samestep verify`: one script at several numbers of processes, and whether each takes the same step."""

import json
import math
import os
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from samestep.errors import UsageError
from samestep.measure.trial import end_on_signals
from samestep.start.devices import visible_devices

if TYPE_CHECKING:
    from samestep.verify.verify import Outcome, Report

_SIZES = (1, 2, 3)
_EPILOG = """\b
Examples:
  samestep verify train.py --epochs 1
  samestep verify -n 1,2,4 --exact train.py
  samestep verify --steps 50 -m package.train

\b
The script runs once for each number in -n, here, and writes what it writes. Exit code 0: each takes
the same step; 1: it does not, or fails; 2: it cannot be verified, or is serial.
"""


@click.command(
    epilog=_EPILOG,
    context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]},
)
@click.option("-n", "sizes", metavar="1,2,3", help="Numbers of processes; the first is compared with.")
@click.option("--exact", is_flag=True, help="Accept nothing but the same bits.")
@click.option("--steps", metavar="K", type=click.IntRange(1), help="End each run after K optimizer steps.")
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module's name, as in python -m.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def command(
    script: str,
    args: tuple[str, ...],
    sizes: str | None,
    exact: bool,
    steps: int | None,
    module: bool,
    as_json: bool,
) -> None:
    """Say whether SCRIPT takes the same step on any number of processes, and if not, why."""
    from samestep.verify.verify import SerialScript, verify

    end_on_signals()
    try:
        if not module and not os.path.isfile(script):
            raise UsageError(f"{script} is no file in {Path.cwd()}; name the script to verify")
        report = verify([*(["-m"] * module), script, *args], _sizes(sizes), exact=exact, steps=steps)
    except UsageError as error:
        diff = _conversion(script, module) if isinstance(error, SerialScript) else None
        if as_json:
            click.echo(json.dumps({"schema_version": 1, "error": str(error), "conversion": diff}))
        click.echo(f"samestep: {error}", err=True)
        if diff and not as_json:
            click.echo(f"\n{diff}")
        raise SystemExit(2) from None
    if report.worst.failure:
        click.echo(report.worst.failure, err=True)
    if as_json:
        click.echo(json.dumps(_document(report), indent=2))
    else:
        for line in _table(report):
            click.echo(line)
        click.echo(f"\n{report}")
    raise SystemExit(0 if report.is_same else 1)


def _sizes(text: str | None) -> list[int]:
    devices = len(visible_devices(os.environ))
    if text is None:
        sizes = [size for size in _SIZES if not devices or size <= devices]
    elif re.fullmatch(r"[1-9][0-9]{0,3}(,[1-9][0-9]{0,3})*", text):
        sizes = list(dict.fromkeys(map(int, text.split(","))))
    else:
        raise UsageError(f"-n {text} is no list of numbers of processes; write for instance -n 1,2,3")
    if devices and max(sizes) > devices:
        raise UsageError(
            f"-n {text} needs {max(sizes)} devices and {devices} are visible; use at most {devices}"
        )
    if len(sizes) < 2:
        one = "there is one device" if text is None else f"-n {text} is one number of processes"
        raise UsageError(
            f"{one}, and a run is compared with another; name two numbers, such as -n 1,2, and hide the "
            "devices with CUDA_VISIBLE_DEVICES= where there are too few"
        )
    return sizes


def _conversion(script: str, module: bool) -> str:
    from samestep.verify.convert import SEVEN_LINES, conversion

    if module:
        return SEVEN_LINES
    return conversion(Path(script).read_text(encoding="utf-8", errors="replace"))


def _table(report: "Report") -> Iterator[str]:
    yield f"{'processes':>9}  {'steps':>5}  {'samples':>7}  {'last loss':>9}  {'first difference':30}  {'size':>7}"
    for one in report.outcomes:
        if one.verdict == "failed":
            yield f"{one.size:>9}  failed"
            continue
        what = str(one.difference or "").partition(" instead of ")[0]
        size = f"{one.distance:.1e}" if one.difference and math.isfinite(one.distance) else ""
        loss = "" if one.loss is None else f"{one.loss:.5g}"
        row = f"{one.size:>9}  {one.steps:>5}  {one.samples:>7}  {loss:>9}  {what:30}  {size:>7}"
        yield row.rstrip()


def _document(report: "Report") -> dict[str, Any]:
    return {
        "schema_version": 1,
        "same": report.is_same,
        "verdict": report.verdict,
        "sentence": str(report),
        "cause": report.worst.cause,
        "sizes": [_outcome(one) for one in report.outcomes],
    }


def _outcome(one: "Outcome") -> dict[str, Any]:
    found = asdict(one) | {"distance": _finite(one.distance), "loss": _finite(one.loss)}
    if one.difference is not None:
        step = None if one.difference.step is None else one.difference.step + 1
        found["difference"] = {
            "sentence": str(one.difference),
            "kind": one.difference.kind,
            "step": step,
            "rank": one.difference.rank,
            "name": one.difference.name,
        }
    return found


def _finite(number: float | None) -> float | None:
    """JSON has no NaN and no infinity: null stands for them."""
    return number if number is not None and math.isfinite(number) else None
