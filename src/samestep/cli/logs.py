"""`samestep logs`: shows a run's output by rank, from its files; -f follows it until the run is over."""

import codecs
import os
import sys
import time
from pathlib import Path

import click

from samestep.cli.output import harmless, numbers, verb
from samestep.files import open_regular
from samestep.measure.runs import Run, find_run, log_of, read_run

_LOOK_S = 0.2
_CHUNK = 1 << 16
_LONGEST_LINE = 1 << 20


@verb("samestep logs")
@click.argument("run", required=False)
@click.option("--rank", "ranks", metavar="0,2|all", default="0", help="Ranks whose output is shown  [0]")
@click.option("-f", "--follow", is_flag=True, help="Follow the output until the run is over.")
def command(run: str | None, ranks: str, follow: bool) -> None:
    """Show the output of RUN.

    \b
    samestep logs
    samestep logs -f --rank all runs/1120-2023

    RUN is a directory, or a name that `samestep runs` lists  [the newest].
    """
    chosen_run = find_run(run)
    # the ranks of a batch job write to a single file
    chosen = (chosen_run.logs or [0]) if ranks == "all" else numbers("--rank", ranks, "ranks")
    paths = {log_of(chosen_run, rank): rank for rank in chosen}
    tails = [Tail(path, f"[rank {rank}] " if len(paths) > 1 else "") for path, rank in paths.items()]
    try:
        _show(chosen_run, tails, follow)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if ranks != "all" and not any(tail.shown for tail in tails):
        click.echo(
            "samestep logs: nothing was written there; --rank all shows the output of all ranks", err=True
        )


class Tail:
    def __init__(self, path: Path, prefix: str) -> None:
        self._path, self._prefix = path, prefix
        self.shown, self._rest = 0, ""
        self._decode = codecs.getincrementaldecoder("utf-8")("backslashreplace").decode

    def more(self, is_last: bool) -> bool:
        """Show new output, with a prefix only complete lines; False if there is nothing new."""
        with open(open_regular(self._path, 2), "rb") as file:
            file.seek(self.shown)
            data = file.read(_CHUNK)
        self.shown += len(data)
        # a carriage return ends a line, so each state of a progress bar is a line
        text = self._rest + self._decode(data).replace("\r\n", "\n").replace("\r", "\n")
        lines, self._rest = text.splitlines(keepends=True), ""
        is_cut = lines and not lines[-1].endswith("\n") and len(lines[-1]) < _LONGEST_LINE
        if is_cut and self._prefix and (data or not is_last):
            self._rest = lines.pop()
        shown = "".join(self._prefix + harmless(line) for line in lines)
        sys.stdout.buffer.write(shown.encode(errors="backslashreplace"))
        sys.stdout.buffer.flush()
        return bool(data)


def _show(run: Run, tails: list[Tail], follow: bool) -> None:
    is_last = False
    while not is_last:
        # checked before reading, so that output from before the run's end is read too
        is_last = not follow or (read_run(run.path) or run).is_over
        while sum(tail.more(is_last) for tail in tails):
            pass
        if not is_last:
            time.sleep(_LOOK_S)
