"""`samestep run`: a script on N processes of this machine."""

import sys

import click

from samestep.errors import UsageError
from samestep.launch.devices import masked, visible_devices
from samestep.launch.script import Script, run_script


@click.command(
    context_settings={
        "allow_interspersed_args": False,
        "token_normalize_func": lambda token: token.replace("_", "-"),
    }
)
@click.option("-n", "--nproc-per-node", "count", metavar="N", help="Number of processes.")
@click.option("--devices", metavar="0,2", help="One process on each of these devices.")
@click.option("--run-dir", metavar="DIR", help="Where runs are kept  [SAMESTEP_RUN_DIR; ./runs]")
@click.option("-m", "--module", is_flag=True, help="The script is a module's name, as in python -m.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def command(
    count: str | None,
    devices: str | None,
    run_dir: str | None,
    module: bool,
    script: str,
    args: tuple[str, ...],
) -> None:
    """Run SCRIPT on N processes of this machine."""
    import os

    size = int(count) if count else len(visible_devices(os.environ)) or 1
    env: dict[str, str] = {}
    if devices:
        env, size = masked(os.environ, devices)
    argv = [sys.executable, *(["-m"] if module else []), script, *args]
    try:
        raise SystemExit(run_script(Script(script, argv, size, env=env, run_dir=run_dir)))
    except UsageError as error:
        click.echo(f"samestep: {error}", err=True)
        raise SystemExit(2) from None
