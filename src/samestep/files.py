"""A file is written whole or not at all: what was there stays until the new one is on the disk."""

import os
import secrets
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO


def write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Replace a file by what `write` writes; after any error the old one is as it was."""
    handled = sys.exception()
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with new.open("xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except BaseException as error:
        with suppress(OSError):
            new.unlink()
        cause = error.__context__
        # torch turns a full disk into a RuntimeError about positions
        if isinstance(error, RuntimeError) and isinstance(cause, OSError) and cause is not handled:
            raise cause from None
        raise
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Make the names in a directory last."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
