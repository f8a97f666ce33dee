"""`samestep submit`: a script as a Slurm job."""

import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import click

from samestep.cli.output import check_script, verb
from samestep.cli.scale import check
from samestep.cli.scale import command as scale_command
from samestep.errors import UsageError
from samestep.rundir import scratch_advice
from samestep.start import slurm
from samestep.start.profiles import MEANS, Profile, load_profile
from samestep.start.slurm import LAUNCHERS, Job

_NUMBERS = ("nodes", "gpus_per_node", "tasks_per_node", "cpus_per_task", "wait")
_TEXTS = (
    *("time", "account", "partition", "qos", "constraint", "mem", "reservation", "mail_user", "mail_type"),
    *("hint", "gpu_option", "signal", "python", "container"),
)
_FLAGS = ("exclusive", "label")
_LISTS = {"modules": "module", "setup": "setup", "env": "env", "options": "option"}


def _profile_options(command: Callable[..., None]) -> Callable[..., None]:
    for key, option in reversed(_LISTS.items()):
        command = click.option(f"--{option}", key, multiple=True, help=f"{MEANS[key]} (Repeatable.)")(command)
    for key in reversed((*_NUMBERS, *_TEXTS, *_FLAGS)):
        more: dict[str, Any] = {"is_flag": True, "default": None} if key in _FLAGS else {}
        kind = click.IntRange(min=0) if key in _NUMBERS else None
        command = click.option(f"--{key.replace('_', '-')}", key, type=kind, help=MEANS[key], **more)(command)
    return command


@verb("samestep submit", allow_interspersed_args=False)
@click.option("--profile", default="gpu-node", show_default=True, help="See `samestep profiles`.")
@_profile_options
@click.option("--requeue/--no-requeue", default=None, help=MEANS["requeue"])
@click.option("--launcher", type=click.Choice(LAUNCHERS), help="What starts the processes  [srun]")
@click.option("--array", help="Job array, such as 0-3: each element is a run of its own.")
@click.option(
    "--array-ranks", "one_run", is_flag=True, help="One run whose ranks are the elements of the job array."
)
@click.option("--scale", metavar="'OPTIONS'", help="Measure SCRIPT by `samestep scale` with these options.")
@click.option("--name", help="The job's name  [the script's]")
@click.option("--run-dir", metavar="DIR", help="Where script and output go  [$SAMESTEP_RUN_DIR, ./runs]")
@click.option("-m", "module", is_flag=True, help="SCRIPT is a module's name, as in python -m.")
@click.option("--dry-run", is_flag=True, help="Print the batch script and submit nothing.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def command(script: str, args: tuple[str, ...], profile: str, dry_run: bool, **given: Any) -> None:
    """Submit SCRIPT to Slurm, one process for each device; an option replaces the profile's.

    \b
    samestep submit --dry-run train.py --epochs 10
    samestep submit --profile idris-v100 --nodes 2 --account abc@v100 --module pytorch-gpu/py3 train.py
    samestep submit --array 0-3 --gpus-per-node 1 train.py
    samestep submit --nodes 2 --scale '-n 1,2,4,8 --repeat 3' train.py
    """
    job_fields = {name: given.pop(name) for name in ("name", "module", "array", "one_run")}
    if (scale := given.pop("scale")) is not None:
        try:
            job_fields["scale"] = tuple(shlex.split(scale))
        except ValueError as error:
            raise UsageError(
                f"--scale {scale} is no list of options ({error}); close the quotation"
            ) from None
        _check_scale(scale, [*job_fields["scale"], script])
    folder = given.pop("run_dir") or os.environ.get("SAMESTEP_RUN_DIR")
    chosen = _over(load_profile(profile, os.environ), given)
    if given.get("wait") is not None and chosen.launcher != "samestep" and not job_fields["one_run"]:
        raise UsageError(
            f"wait {chosen.wait} has no effect with launcher {chosen.launcher}, whose processes start together; leave "
            "it out, or add --array-ranks or --launcher samestep"
        )
    is_elsewhere = chosen.container or chosen.setup or script.startswith("-")
    check_script(script, bool(job_fields["module"] or is_elsewhere))
    job = Job(chosen, script, args, run_dir=folder, **job_fields)
    words = ["samestep", *sys.argv[1:]]
    if dry_run:
        words.remove("--dry-run")  # the first is ours: options come before the script
        click.echo(slurm.batch_script(job, words).encode(errors="surrogateescape"), nl=False)
        return
    if advice := scratch_advice(job.folder.absolute() / job.title, os.environ):
        click.echo(f"samestep submit: {advice}", err=True)
    slurm.check_nodes(chosen)
    path = slurm.write_script(job, words)
    click.echo(f"wrote {path}")
    number = slurm.submit(path)
    where = slurm.output_of(job, number)
    follow = f"follow it with `tail -F {shlex.quote(where)}`" if where else f"its output goes to {job.output}"
    click.echo(f"job {number}; {follow}")


def _check_scale(text: str, words: list[str]) -> None:
    """Find a wrong option now, not after hours in the queue."""
    try:
        options = scale_command.make_context("samestep scale", words).params
    except click.ClickException as error:
        raise UsageError(f"--scale {text}: {error.format_message()} See `samestep scale --help`.") from None
    if options["args"]:
        raise UsageError(f"--scale {text} has the word {options['script']}, which is no option; leave it out")
    check(options)


def _over(profile: Profile, given: dict[str, Any]) -> Profile:
    """The profile with the given options; modules, set-up, variables and options are added to the profile's."""
    pairs = [pair.partition("=") for pair in given.pop("env")]
    for name, equals, _ in pairs:
        if not equals:
            raise UsageError(f"env {name!r} sets nothing; write it as {name}=VALUE")
    changed = {key: value for key, value in given.items() if value is not None}
    for key in ("modules", "setup", "options"):
        changed[key] = (*getattr(profile, key), *given[key])
    changed["env"] = {**(profile.env or {}), **{name: value for name, _, value in pairs}}
    return replace(profile, **changed)
