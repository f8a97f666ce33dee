"""`samestep stop`: asks a run to commit its state and end, by a file in its directory."""

import click

from samestep.errors import UsageError
from samestep.measure.runs import find_run
from samestep.rundir import stop_path


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("run", required=False)
def command(run: str | None) -> None:
    """Ask RUN to commit its state after the step it is in, and end with exit code 75; the newest by default.

    Only a script that has a samestep.Checkpoint listens. It works from any machine that sees the directory.
    """
    try:
        found = find_run(run)
        if found.is_over:
            raise UsageError(f"{found.path} is {found.state}, so there is nothing to stop")
        stop_path(found.path).touch()
    except UsageError as error:
        click.echo(f"samestep stop: {error}", err=True)
        raise SystemExit(2) from None
    except OSError as error:
        click.echo(
            f"samestep stop: {found.path} cannot be written ({(error.strerror or '').lower()})", err=True
        )
        raise SystemExit(1) from None
    click.echo(f"{found.path} was asked to stop; `samestep status {found.path}` says when it has")
