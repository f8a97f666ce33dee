"""`samestep stop`: asks a run to commit its state and end, by a file in its directory."""

import os
from contextlib import suppress

import click

from samestep.cli.output import harmless, verb
from samestep.errors import UsageError
from samestep.files import open_directory
from samestep.measure.runs import find_run
from samestep.rundir import STOP
from samestep.text import reason_of


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
    chosen_run = find_run(run)
    path = harmless(chosen_run.path)
    if chosen_run.is_over:
        raise UsageError(f"{path} has ended ({chosen_run.state}), so there is nothing to stop")
    # in its directory, not where a link leads
    try:
        with open_directory(chosen_run.path) as dir_fd, suppress(FileExistsError):
            os.close(os.open(STOP, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=dir_fd))
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written ({reason_of(error)}); stop the run as the user who started it"
        ) from None
    click.echo(
        f"{path} was asked to stop: it ends once its samestep.Checkpoint has committed, and goes on if it has none; "
        "`samestep status` says when it has ended"
    )
