"""`samestep stop`: asks a run to commit its state and end, by a file in its directory."""

import click

from samestep.cli.output import verb
from samestep.errors import UsageError
from samestep.measure.runs import find_run
from samestep.rundir import stop_path


@verb("samestep stop")
@click.argument("run", required=False)
def command(run: str | None) -> None:
    """Ask RUN to commit its state after the current step and end with exit code 75.

    \b
    samestep stop
    samestep stop runs/1120-2023

    RUN is a directory, or a name that `samestep runs` lists  [the newest]. The script must have a
    samestep.Checkpoint. The command works on any machine that sees the directory.
    """
    found = find_run(run)
    if found.is_over:
        raise UsageError(f"{found.path} is {found.state}, so there is nothing to stop")
    stop_path(found.path).touch()
    click.echo(f"{found.path} was asked to stop; `samestep status {found.path}` says when it has")
