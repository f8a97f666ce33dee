"""`samestep env`: prints the placement of this process, and the variables that it comes from."""

import os
from dataclasses import asdict

import click

import samestep
from samestep.cli.output import print_json, print_table, verb
from samestep.placement.place import this_process


@verb("samestep env")
@click.option("--explain", is_flag=True, help="Name the variable that each value came from.")
@click.option("--all", "all_ranks", is_flag=True, help="Wait for all ranks; rank 0 prints a line for each.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(explain: bool, all_ranks: bool, as_json: bool) -> None:
    """Print this process's rank, its node, and the address at which the ranks meet.

    \b
    samestep env
    srun --ntasks=4 samestep env --explain
    mpirun -n 4 samestep env --json
    srun --ntasks=4 samestep env --all
    """
    if all_ranks:
        os.environ["SAMESTEP_LAYOUT"] = "json" if as_json else "table"
        samestep.init()
        return
    p = this_process()
    if as_json:
        print_json(asdict(p))
    else:
        meeting = f", meeting at {p.master_addr}:{p.master_port}" if p.master_addr and p.master_port else ""
        started = "started alone" if p.launcher == "alone" else f"started by {p.launcher}"
        click.echo(
            f"rank {p.rank} of {p.size}, local rank {p.local_rank} of {p.local_size}, "
            f"node {p.node} of {p.nodes}, {started}{meeting}"
        )
    if explain and not as_json:
        rows = ((name, value, p.origin[name]) for name, value in asdict(p).items() if name in p.origin)
        print_table([("", "value", "from"), *rows])
    for note in p.notes:
        click.echo(f"note: {note}", err=True)
