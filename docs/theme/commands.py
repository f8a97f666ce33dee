"""Puts the help of every command of samestep into the page of commands."""

import importlib
from typing import Any

import click

from samestep import cli

_MARK = "<!-- every command -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    return markdown.replace(_MARK, _commands()) if _MARK in markdown else markdown


def _commands() -> str:
    groups = [
        f"## {group}\n\n" + "\n".join(_command(verb, line) for verb, line in verbs.items())
        for group, verbs in cli._VERBS.items()
    ]
    return "\n".join(groups)


def _command(verb: str, line: str) -> str:
    command: click.Command = importlib.import_module(f"samestep.cli.{verb}").command
    name = f"samestep {verb}"
    text = command.get_help(click.Context(command, info_name=name, terminal_width=96, max_content_width=96))
    return f"### {name}\n\n{line}\n\n```text\n{text}\n```\n"
