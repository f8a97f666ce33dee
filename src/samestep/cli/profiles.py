"""`samestep profiles`: lists the profiles of jobs, or explains one."""

import json
import os
from dataclasses import asdict

import click

from samestep.cli.output import print_json, print_table, verb
from samestep.errors import UsageError
from samestep.start.profiles import MEANS, load_profile, profile_paths
from samestep.start.slurm import Job


@verb("samestep profiles")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.argument("name", required=False)
def command(as_json: bool, name: str | None) -> None:
    """List the profiles that `samestep submit --profile` takes, or explain profile NAME.

    \b
    samestep profiles
    samestep profiles idris-v100

    A file NAME.toml in $SAMESTEP_PROFILES or $XDG_CONFIG_HOME/samestep/profiles (~/.config) adds a profile. With
    `base = "idris-v100"` it contains only the differences from that profile, whose name it may have.
    """
    paths = profile_paths(os.environ)
    loaded, code = {}, 0
    for profile_name in [name] if name else paths:
        try:
            loaded[profile_name] = load_profile(profile_name, os.environ)
        except UsageError as error:
            click.echo(f"samestep profiles: {error}", err=True)
            code = 2
    if not loaded:
        raise SystemExit(code)
    if as_json:
        profiles = {key: {"path": str(paths[key]), **asdict(profile)} for key, profile in loaded.items()}
        print_json({"profiles": profiles})
    elif name:
        for key, value in asdict(loaded[name]).items():
            if value not in (None, "", (), {}):
                written = json.dumps(value, ensure_ascii=False)
                click.echo(f"{key.replace('_', '-')} = {written}  # {MEANS[key]}")
        click.echo(paths[name])
    else:
        jobs = {key: Job(profile, "script.py") for key, profile in loaded.items()}
        rows = [(key, job.tasks, job.cores or "-", job.profile.about) for key, job in jobs.items()]
        print_table([("profile", "processes/node", "cores/process", "for"), *rows])
    raise SystemExit(code)
