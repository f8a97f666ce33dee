"""`samestep env`: who this process is, on one line or as JSON, and which variable says so."""

import json
from dataclasses import asdict

import click

from samestep.errors import PlacementError
from samestep.placement.place import Placement, this_process


@click.command(short_help="Say who this process is, and which variable says so.")
@click.option("--explain", is_flag=True, help="Name the variable that each value came from.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object, with a schema_version.")
def command(explain: bool, as_json: bool) -> None:
    """Say who this process is: its rank, its node, and where the ranks meet.

    \b
    samestep env
    srun --ntasks=4 samestep env --explain
    mpirun -n 4 samestep env --json
    """
    try:
        placement = this_process()
    except PlacementError as error:
        click.echo(f"samestep env: {error}", err=True)
        raise SystemExit(2) from None
    if as_json:
        click.echo(json.dumps({"schema_version": 1} | asdict(placement)))
    else:
        click.echo(_line(placement))
    if explain and not as_json:
        wide = max(len(str(getattr(placement, name))) for name in placement.origin)
        for name, said in placement.origin.items():
            click.echo(f"  {name:11}  {getattr(placement, name):<{wide}}  {said}")
    for note in placement.notes:
        click.echo(f"note: {note}", err=True)


def _line(p: Placement) -> str:
    meeting = f", meeting at {p.master_addr}:{p.master_port}" if p.master_addr and p.master_port else ""
    return (
        f"rank {p.rank} of {p.size}, local rank {p.local_rank} of {p.local_size}, "
        f"node {p.node} of {p.nodes}, started by {p.launcher}{meeting}"
    )
