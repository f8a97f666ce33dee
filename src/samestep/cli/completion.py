"""`samestep completion`: what a shell needs to complete samestep's commands and options; --install puts it in place."""

import os
from importlib import import_module
from pathlib import Path

import click

from samestep.cli import COMMANDS
from samestep.cli.output import verb
from samestep.files import write_atomically

_BASH = """\
_samestep() {
    local word=${COMP_WORDS[COMP_CWORD]} offered=""
    if [ "$COMP_CWORD" -eq 1 ]; then offered="%(commands)s"
    else case ${COMP_WORDS[1]} in
%(cases)s
    esac; fi
    if [ "$COMP_CWORD" -eq 1 ] || [[ $word == -* ]]; then COMPREPLY=($(compgen -W "$offered" -- "$word"))
    else COMPREPLY=(); fi
}
complete -o default -F _samestep samestep
"""
# zsh reads bash's functions. It runs the file at the first completion, and expects that to be answered.
_ZSH = """\
#compdef samestep
autoload -U +X bashcompinit && bashcompinit
%s[[ ${funcstack[1]-} != _samestep ]] || _bash_complete -o default -F _samestep
"""
_HOMES = {
    "bash": "~/.local/share/bash-completion/completions/samestep",
    "zsh": "~/.zfunc/_samestep",
    "fish": "~/.config/fish/completions/samestep.fish",
}


@verb("samestep completion")
@click.argument("shell", type=click.Choice(list(_HOMES)))
@click.option(
    "--install", is_flag=True, help="Write it to where the shell looks for it, and say where that is."
)
def command(shell: str, install: bool) -> None:
    """Print the completion of samestep's commands and options for SHELL.

    \b
    samestep completion bash --install
    samestep completion fish | source
    """
    script = {"bash": _bash, "zsh": lambda: _ZSH % _bash(), "fish": _fish}[shell]()
    if not install:
        click.echo(script, nl=False)
        return
    path = Path(os.path.expanduser(_HOMES[shell]))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, script.encode(), 0o644)
    after = {"zsh": "; ~/.zshrc needs: fpath+=~/.zfunc; autoload -Uz compinit; compinit"}.get(shell, "")
    click.echo(f"{path} is written; a new {shell} completes samestep{after}")


def _options(name: str) -> dict[str, str]:
    """Every option of a command, with what it does."""
    found: click.Command = import_module(f"samestep.cli.{name}").command
    params = found.get_params(click.Context(found))
    return {
        word: (param.help or "").partition(".")[0]
        for param in params
        if isinstance(param, click.Option) and not param.hidden
        for word in (*param.opts, *param.secondary_opts)
    }


def _bash() -> str:
    cases = "\n".join(f'    {name}) offered="{" ".join(_options(name))}" ;;' for name in COMMANDS)
    return _BASH % {"commands": " ".join(COMMANDS), "cases": cases}


def _fish() -> str:
    lines = [
        f"complete -c samestep -n __fish_use_subcommand -f -a {name} -d {_quoted(what)}"
        for name, what in COMMANDS.items()
    ]
    for name in COMMANDS:
        for word, what in _options(name).items():
            kind = f"-l {word[2:]}" if word.startswith("--") else f"-s {word[1:]}"
            lines.append(
                f"complete -c samestep -n '__fish_seen_subcommand_from {name}' {kind} -d {_quoted(what)}"
            )
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    escaped = " ".join(text.split()).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
