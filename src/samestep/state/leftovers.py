"""Removes files that their writers could not finish, because they were killed; files.py names them.

Apart from files.py, which every process imports at its start: psutil takes longer to import than all of it.
"""

import os
import re
from contextlib import suppress
from pathlib import Path

import psutil

from samestep.files import here, open_directory, unfinished_prefix

_UNFINISHED = re.compile(r"([0-9a-f]{16})-(\d{1,9})-[0-9a-f]{8}")
ABANDONED_SECONDS = 3600


def remove_unfinished(dir_fd: int, prefix: str) -> None:
    """Remove files that ended writers left; a writer on another machine counts as ended after an hour."""
    for name in os.listdir(dir_fd):
        match = _UNFINISHED.fullmatch(name.removeprefix(prefix)) if name.startswith(prefix) else None
        with suppress(OSError):
            if match and _is_abandoned(dir_fd, name, match[1], int(match[2])):
                os.unlink(name, dir_fd=dir_fd)


def remove_unfinished_beside(path: Path) -> None:
    """Remove what ended writers of this file left beside it."""
    with suppress(OSError), open_directory(path.parent) as dir_fd:
        remove_unfinished(dir_fd, unfinished_prefix(path))


def _is_abandoned(dir_fd: int, name: str, place: str, pid: int) -> bool:
    if place == here():
        return not psutil.pid_exists(pid)
    # both times come from the file server, so clocks of two machines are not compared
    os.utime(dir_fd)
    return os.fstat(dir_fd).st_mtime - os.stat(name, dir_fd=dir_fd).st_mtime > ABANDONED_SECONDS
