"""`samestep checkpoints DIR` lists the commits in a directory, and checks them; no torch."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import click

from samestep.cli.output import print_table, verb, working
from samestep.errors import CheckpointError
from samestep.files import open_directory
from samestep.state import file as state_file
from samestep.state.directory import Candidate, examine
from samestep.text import printable, size

_LEFT_OUT = ("step", "time", "commit_seconds")  # in columns of their own; a guess in the first commit


@verb("samestep checkpoints")
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--verify", is_flag=True, help="Read every byte and compare the digests.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each checkpoint.")
def command(directory: Path, verify: bool, as_json: bool) -> None:
    """List the checkpoints of DIRECTORY, newest first; exit with 1 if one of them is bad.

    \b
    samestep checkpoints runs/checkpoints
    samestep checkpoints runs/checkpoints --verify

    Without --verify only each header is checked. "complete": no byte is missing; "good": every byte is right.
    """
    with open_directory(directory) as dir_fd, working("reading"):
        rows = [_row(dir_fd, commit, verify) for commit in examine(dir_fd)]
    if as_json:
        for row in rows:
            click.echo(json.dumps(row))
    elif rows:
        _table(rows)
    else:
        click.echo(f"no checkpoints in {directory}")
    sys.exit(any(row["state"] == "bad" for row in rows))


def _row(dir_fd: int, commit: Candidate, verify: bool) -> dict[str, Any]:
    entry, outline, why = commit.entry, commit.outline, commit.why
    row: dict[str, Any] = {"file": entry.name, "step": outline.seal.step if outline else entry.step}
    try:
        row["bytes"] = os.stat(entry.name, dir_fd=dir_fd, follow_symlinks=False).st_size
        if verify and outline and not why:
            state_file.verify(entry.name, dir_fd=dir_fd)
    except (CheckpointError, OSError) as error:
        why = str(error)
    if outline is None or why:
        return {**row, "state": "bad", "why": why.removeprefix(f"{entry.name} ")}
    facts = {"run": outline.seal.run.hex(), "meta": outline.meta, "digest": outline.root.hex()}
    return {**row, "state": "good" if verify else "complete", **facts}


def _table(rows: list[dict[str, Any]]) -> None:
    table: list[tuple[object, ...]] = [("step", "committed", "size", "state", "from")]
    for row in rows:
        meta = row.get("meta", {})
        facts = {key: value for key, value in meta.items() if key not in _LEFT_OUT and value != ""}
        origin = " ".join(f"{'ranks' if key == 'size' else key}={value}" for key, value in facts.items())
        text = printable(row.get("why", origin))
        table.append((row["step"], _when(meta), size(row.get("bytes", 0)), row["state"], text))
    print_table(table)


def _when(meta: dict[str, Any]) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(meta["time"])) if "time" in meta else "-"
