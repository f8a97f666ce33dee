"""`samestep completion`: prints or installs a shell's completion of samestep's commands and options."""

from importlib import import_module
from pathlib import Path

import click
from click.shell_completion import get_completion_class, shell_complete

from samestep.cli import COMMANDS
from samestep.cli.output import verb
from samestep.files import write_atomically

_VARIABLE = "_SAMESTEP_COMPLETE"
_HOMES = {
    "bash": "~/.local/share/bash-completion/completions/samestep",
    "zsh": "~/.zfunc/_samestep",
    "fish": "~/.config/fish/completions/samestep.fish",
}


class _Verbs(click.Group):
    """All commands, each loaded when a shell asks for its options."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command_: click.Command = import_module(f"samestep.cli.{name}").command
        for param in command_.params:
            if isinstance(param, click.Argument) and param.type in (click.STRING, click.UNPROCESSED):
                param.type = click.Path()  # a script and its arguments: the shell offers files
        return command_


def complete(request: str) -> int:
    """Answer a shell; `request` is the value of _VARIABLE, such as bash_complete."""
    return shell_complete(_Verbs("samestep"), {}, "samestep", _VARIABLE, request)


@verb("samestep completion")
@click.argument("shell", metavar="SHELL", type=click.Choice(list(_HOMES)))
@click.option("--install", is_flag=True, help="Write it to where the shell looks for it, and say where.")
def command(shell: str, install: bool) -> None:
    """Print the completion of samestep's commands and options for SHELL.

    \b
    samestep completion bash --install
    samestep completion fish | source
    """
    completion = get_completion_class(shell)
    assert completion is not None
    script = completion(_Verbs("samestep"), {}, "samestep", _VARIABLE).source()
    if not install:
        click.echo(script, nl=False)
        return
    path = Path(_HOMES[shell]).expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, script.encode(), 0o644)
    after = {"zsh": "; ~/.zshrc needs: fpath+=~/.zfunc; autoload -Uz compinit; compinit"}.get(shell, "")
    click.echo(f"{path} is written; a new {shell} completes samestep{after}")
