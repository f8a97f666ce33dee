"""`samestep verify`: runs a script at several numbers of processes and says whether each takes the same step."""

import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from samestep.cli.output import (
    check_script,
    print_json,
    print_sentence,
    print_table,
    progress,
    remark_on_options,
    sizes_of,
    verb,
)
from samestep.errors import UsageError
from samestep.measure.trial import end_on_signals
from samestep.placement.devices import visible_devices
from samestep.text import duration

if TYPE_CHECKING:
    from samestep.verify.trajectory import Compared
    from samestep.verify.verify import Report

_SIZES = (1, 2, 3)
_HEADING = ("processes", "steps", "samples", "last loss", "first difference", "size")


@verb("samestep verify", allow_interspersed_args=False)
@click.option("-n", "sizes", metavar="1,2,3", help="Numbers of processes, the reference first  [1,2,3]")
@click.option(
    "--against",
    metavar="SERIAL",
    help="The untouched script, with -m a module: say whether SCRIPT, its conversion, takes its step.",
)
@click.option("--exact", is_flag=True, help="Fail unless all bits are the same.")
@click.option("--no-causes", is_flag=True, help="Do not look for causes, or compare what is printed.")
@click.option("--steps", metavar="K", type=click.IntRange(1), help="Stop each run after K optimizer steps.")
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module's name, as in python -m.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def command(script: str, args: tuple[str, ...], against: str | None, module: bool, **options: Any) -> None:
    """Say whether SCRIPT takes the same step on any number of processes, and if not, why.

    \b
    samestep verify train.py --epochs 1
    samestep verify -n 1,2,4 --exact train.py
    samestep verify --steps 50 -m package.train
    samestep verify --against train_serial.py train.py --epochs 1

    SCRIPT runs on this machine, once for each number in -n, and writes its usual files each time. Where the runs
    differ, it runs again without what may be the cause, until no difference is left: with --same, with seeds set,
    without its rank, and so on; Ctrl-C or SIGTERM then prints what is known. With --against, SERIAL runs too, by
    itself and with the same arguments, and SCRIPT with --same, and once without it.

    Exit code: 0 each run takes the same step and prints the same; 1 a run takes another step, or fails; 2 SCRIPT does
    not use samestep, or cannot be verified; 3 each run takes the same step, but what it prints or saves comes from
    one rank alone; 130 Ctrl-C, and 143 SIGTERM, came before the end.
    """
    from samestep.convert.convert import conversion
    from samestep.verify.verify import SerialScript, verify

    try:
        check_script(script, module)
        check_script(against or script, module)
        remark_on_options("samestep verify", command, script, args)
        against = against.removesuffix(".py").replace("/", ".") if against and module else against
        with end_on_signals(), progress(None) as report_progress:
            report = verify(
                [*(["-m"] * module), script, *args],
                _sizes(options["sizes"], least=1 if against else 2),
                exact=options["exact"],
                steps=options["steps"],
                against=[*(["-m"] * module), against, *args] if against else [],
                causes=not options["no_causes"],
                progress=lambda run: report_progress(0, f"samestep verify: running {run}", ""),
                differing=_show_differing,
            )
    except UsageError as error:
        diff = conversion(Path(script)) if isinstance(error, SerialScript) and not module else None
        click.echo(f"samestep verify: {error}", err=True)
        if options["as_json"]:
            print_json({"error": str(error), "conversion": diff})
        elif diff:
            click.echo(f"\n{diff}")
        raise SystemExit(2) from None
    if report.verdict == "failed":
        click.echo(report.worst.run.failure, err=True)
    if options["as_json"]:
        print_json(_document(report), indent=2)
    else:
        _show_table(report)
        click.echo()
        for line in report.lines:
            print_sentence(line)
    raise SystemExit(report.exit_code)


def _sizes(text: str | None, least: int) -> list[int]:
    devices = len(visible_devices(os.environ))
    usual = [size for size in _SIZES if not devices or size <= devices]
    sizes = usual if text is None else sizes_of("-n", text)
    if devices and max(sizes) > devices:
        raise UsageError(
            f"-n {text} needs {max(sizes)} devices and {devices} are visible; use at most {devices}"
        )
    if len(sizes) < least:
        given = "one device is visible" if text is None else f"-n {text} is one number of processes"
        hidden = ", and set CUDA_VISIBLE_DEVICES= to run on the cores" if devices else ""
        raise UsageError(f"{given}, and verify compares at least two; write for instance -n 1,2{hidden}")
    return sizes


def _show_differing(report: "Report") -> None:
    """Show the planned runs before those that look for causes begin."""
    _show_table(report, err=True)
    seconds = max(outcome.run.seconds for outcome in report.outcomes.values())
    found = "these runs differ; to tell whether that is a mistake, and which"
    if report.verdict == "failed":
        click.echo(f"\n{report.worst.run.failure}", err=True)
        found = "to tell which line of the script is the cause"
    click.echo(
        f"\nsamestep verify: {found}, mostly 4 to 12 more runs follow, of about {duration(seconds)} each; Ctrl-C "
        "prints what is known by then, --no-causes leaves them out",
        err=True,
    )


def _show_table(report: "Report", err: bool = False) -> None:
    is_no_mistake = report.step in ("with_same", "augmented")
    rows = (_row(size, outcome, is_no_mistake) for size, outcome in report.outcomes.items())
    print_table([_HEADING, *rows], err)


def _row(size: int | None, outcome: "Compared", is_no_mistake: bool) -> tuple[object, ...]:
    name, run = size or "untouched", outcome.run
    if outcome.verdict == "failed":
        return (name, "failed", "", "", "", "")
    difference = outcome.difference or outcome.bits or ""
    loss = "" if run.last_loss is None else f"{run.last_loss:.5g}"
    distance = f"{outcome.distance:.1e}" if difference and math.isfinite(outcome.distance) else ""
    shown = f"{difference} (no mistake)" if outcome.difference and is_no_mistake else difference
    return (name, run.length, run.samples, loss, shown, distance)


def _document(report: "Report") -> dict[str, Any]:
    return {
        "same": report.exit_code == 0,
        "verdict": report.verdict,
        "sentence": str(report),
        "cause": report.harmful[0].sentence if report.harmful else None,
        "causes": [asdict(cause) for cause in report.causes],
        "printed": [asdict(line) for line in report.printed],
        "remarks": report.remarks,
        "said": report.said,
        "sizes": [_outcome(size, outcome) for size, outcome in report.outcomes.items()],
    }


def _outcome(size: int | None, outcome: "Compared") -> dict[str, Any]:
    run, difference = outcome.run, outcome.difference or outcome.bits
    step = None if difference is None or difference.step is None else difference.step + 1
    return {
        "size": size,
        "steps": run.length,
        "samples": run.samples,
        "loss": run.last_loss,
        "verdict": outcome.verdict,
        "difference": difference
        and {
            "kind": difference.kind,
            "step": step,
            "rank": difference.rank,
            "name": difference.name,
            "sentence": str(difference),
        },
        "distance": outcome.distance,
        "note": outcome.note,
        "failure": run.failure if run.code else None,
    }
