"""`samestep scale`: measures a script at several numbers of processes, or under several settings, and judges."""

import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import TYPE_CHECKING, Any

import click

from samestep.cli.output import check_script, print_json, print_table, progress, room, sizes_of, verb
from samestep.errors import UsageError, WorkerFailed
from samestep.measure.trial import end_on_signals
from samestep.placement.devices import are_cores_free, cores, visible_devices
from samestep.placement.launchers import count
from samestep.text import counted, unbroken

if TYPE_CHECKING:
    from samestep.measure.predict import Link, Prediction
    from samestep.measure.scale import Variant


@verb("samestep scale", allow_interspersed_args=False)
@click.option("-n", "sizes", metavar="1,2,4", help="Numbers of processes  [1,2,4,... up to cores or devices]")
@click.option("--weak", is_flag=True, help="Multiply batch_size by the number of processes.")
@click.option("--repeat", metavar="K", default=5, type=click.IntRange(1), help="Runs of each  [5]")
@click.option("--steps", metavar="K", default=200, type=click.IntRange(10), help="Steps of each run  [200]")
@click.option(
    "--vary",
    multiple=True,
    metavar="NAME=A,B",
    help="Also compare settings: launcher=run,torchrun,srun,mpirun, backend=gloo,nccl, method=ddp,dataparallel, "
    "nodes=1,2, an option of DistributedDataParallel such as bucket_cap_mb=1,25, or a variable such as "
    "NCCL_ALGO=Ring,Tree.",
)
@click.option(
    "--cores", "each", metavar="C", type=click.IntRange(1), help="Cores of each process  [all / largest -n]"
)
@click.option("--predict", metavar="8,16,64", help="Also predict throughput at these sizes without a run.")
@click.option("--link", metavar="25GB/s,5us", help="The link to predict for  [this machine's, measured]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module's name, as in python -m.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def command(script: str, args: tuple[str, ...], **options: Any) -> None:
    """Say how much faster SCRIPT is on N processes, where the rest of the time goes, and whether it is worth it.

    \b
    samestep scale train.py --epochs 1
    samestep scale -n 1,2,4 --steps 100 train.py
    samestep scale -n 4 --vary bucket_cap_mb=0.5,5,25 train.py
    samestep scale -n 2 --vary launcher=run,torchrun train.py
    samestep scale -n 1,2 --predict 8,64 --link 25GB/s,5us train.py

    SCRIPT runs unchanged, in turns at each size, and writes its usual files. Each run ends after --steps steps. Every
    process has as many cores at every size. A measurement that was interrupted goes on at the same command.
    """
    from samestep.measure.predict import model_of
    from samestep.measure.report import Report
    from samestep.measure.scale import Plan, measure, variants
    from samestep.measure.verdict import rows_of, verdict

    check_script(script, options["module"])
    words = [*(["-m"] * options["module"]), script, *args]
    sizes, predicted_sizes, link = check(options)
    chosen = variants(sizes or _usual_sizes(bool(options["vary"])), options["vary"], options["each"])
    lacking = [why for variant in chosen if (why := variant.lacks)]
    chosen = [variant for variant in chosen if not variant.lacks]
    if not chosen:
        raise UsageError(f"{lacking[0]}; leave it out")
    lacking += _crowded(max(variant.processes for variant in chosen))
    lacking += _without_effect(chosen)
    plan = Plan(words, chosen, options["repeat"], options["steps"], options["weak"])
    with end_on_signals():
        try:
            with progress(len(chosen) * plan.repeat) as report_progress:
                measured, failures = measure(plan, report_progress)
        except KeyboardInterrupt:
            click.echo(
                f"samestep scale: runs are kept in {plan.directory}; the same command goes on", err=True
            )
            raise
        rows = rows_of(measured, chosen, plan.weak)
        predicted: list[Prediction] = []
        try:
            model = model_of(plan, rows, link) if predicted_sizes else None
            predicted += (model.predict(size) for size in predicted_sizes if model)
        except WorkerFailed as error:  # still report what was measured
            lacking.append(f"Not predicted: {error}")
    if (least := min(run.steps for run in measured)) < plan.steps:
        lacking.append(f"A run ended after {least} of the {plan.steps} steps: that is all the script takes")
    lacking += (f"{variant.in_words} failed" for variant in failures)
    text = " ".join([verdict(rows), *(f"{why}." for why in lacking)])
    report = Report(rows, text, predicted)
    document: dict[str, object] = {
        "script": words,
        "host": os.uname().nodename,
        "made": time.time(),
        "weak": plan.weak,
        "steps": plan.steps,
        "rows": [row.facts() for row in rows],
        "verdict": report.verdict,
        "predicted": [vars(prediction) for prediction in predicted],
    }
    made = f"{shlex.join(['samestep', *sys.argv[1:]])}, on {os.uname().nodename}, {time.strftime('%Y-%m-%d %H:%M')}"
    written = report.write(plan.directory, " ".join(words), made, document)
    if options["as_json"]:
        print_json(document, indent=1)
    else:
        for _, rows_of_table in report.tables():
            print_table(rows_of_table)
            click.echo()
        for text in report.sentences():
            click.echo(fill(unbroken(text), room()).replace("\xa0", " ") + "\n")
        click.echo(f"Report: {written}")
    for failure in failures.values():
        click.echo(f"\n{failure}", err=True)
    if failures:
        raise SystemExit(1)


def check(options: Mapping[str, Any]) -> "tuple[list[int], list[int], Link | None]":
    """Check -n, --vary, --predict and --link before anything runs; returns sizes, predicted sizes, and the link."""
    from samestep.measure.predict import link_of
    from samestep.measure.scale import choices_of

    choices_of(options["vary"])
    if options["link"] and not options["predict"]:
        raise UsageError("--link is for --predict; add the sizes to predict, such as --predict 8,16")
    if options["vary"] and options["predict"]:
        raise UsageError("--predict is about sizes and --vary about settings; leave one of them out")
    given = sizes_of("-n", options["sizes"]) if options["sizes"] is not None else []
    predicted = sizes_of("--predict", options["predict"]) if options["predict"] is not None else []
    link = link_of(options["link"], is_gloo=not visible_devices(os.environ)) if options["link"] else None
    return sorted(given), sorted(predicted), link


def _crowded(processes: int) -> list[str]:
    if processes <= (here := len(cores())) or not are_cores_free(os.environ):
        return []
    return [f"{processes} processes shared {counted(here, 'core')} and slowed each other down"]


def _without_effect(chosen: "Sequence[Variant]") -> list[str]:
    """NCCL's variables where the runs use Gloo."""
    uses_nccl = visible_devices(os.environ) or any(
        variant.asked.get("backend") == "nccl" for variant in chosen
    )
    names = dict.fromkeys(
        name for variant in chosen for name, _ in variant.settings if name.startswith("NCCL_")
    )
    return [] if uses_nccl else [f"{name} has no effect here, where the runs use Gloo" for name in names]


def _usual_sizes(varies: bool) -> list[int]:
    most = count(os.environ, "SLURM_NTASKS") or len(visible_devices(os.environ)) or len(cores())
    sizes = [1]
    while sizes[-1] * 2 <= most:
        sizes.append(sizes[-1] * 2)
    return sizes[-1:] if varies else sizes
