"""The command line: one file a verb, loaded when it is typed; `samestep --help` never imports torch."""

from importlib import import_module

import click

_VERBS = {
    "run": "Run a script on N processes of this machine.",
    "submit": "Submit a script as a Slurm job.",
    "profiles": "List what a job can be submitted as, or explain one.",
    "env": "Say who this process is, and which variable says so.",
    "demo": "Train a small network at 1 and 2 processes and compare.",
    "compare": "Say which tensors differ between weights files, and by how much.",
    "checkpoints": "List the checkpoints in a directory: which are good, and what made them.",
    "export": "Write the plain weights of a checkpoint as .safetensors or .pt.",
}


class _Verbs(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_VERBS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _VERBS:
            return None
        command: click.Command = import_module(f"samestep.cli.{name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_VERBS.items()))


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option("0.1.0", prog_name="samestep")
def main() -> None:
    """Run one serial PyTorch script on any number of processes, with the same numbers."""
