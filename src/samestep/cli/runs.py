"""`samestep runs`: lists runs, the newest first, from their files."""

import time
from datetime import timedelta
from typing import Any

import click

from samestep.cli.output import harmless, print_json, print_table, verb
from samestep.errors import UsageError
from samestep.measure.runs import list_runs, root_of
from samestep.text import figures, printable

_HEADING = ("run", "state", "ranks", "step", "steps/s", "started", "took", "command")


@verb("samestep runs")
@click.argument("directory", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(directory: str | None, as_json: bool) -> None:
    """List the runs in DIRECTORY  [$SAMESTEP_RUN_DIR, ./runs], the newest first.

    \b
    samestep runs
    samestep runs /scratch/runs --json
    """
    root = root_of(directory)
    if directory and not root.is_dir():
        raise UsageError(f"{directory} is not a directory; write the one where runs are kept")
    rows = [run.facts() for run in list_runs(root)]
    reports = [str(page) for page in sorted(root.glob("scale-*/report.html"))]
    if as_json:
        print_json({"runs": rows, "reports": reports})
        return
    if rows:
        print_table([_HEADING, *map(_cells, rows)])
    else:
        click.echo(f"no runs in {root}")
    for page in reports:
        click.echo(f"measured by samestep scale: {harmless(page)}")


def _cells(row: dict[str, Any]) -> tuple[object, ...]:
    name = printable(row["run"].rpartition("/")[2])
    step = "-" if row["step"] is None else row["step"]
    speed = figures(row["steps_per_second"]) if row["steps_per_second"] else "-"
    started = time.strftime("%m-%d %H:%M", time.localtime(row["started"]))
    took = timedelta(seconds=int(row["seconds"]))
    return name, row["state"], row["ranks"], step, speed, started, took, row["command"]
