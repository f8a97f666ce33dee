"""The key of a run: 32 random bytes that only its processes have; a process must prove that it has them to join.

`samestep run` gives its workers a new key through an inherited descriptor. Without inheritance (srun, mpirun, torchrun,
launchers of several nodes) the key is in a file that only its user can read, or in SAMESTEP_KEY.
"""

import hmac
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from samestep.errors import PlacementError
from samestep.files import make_private_directory, open_regular, unnamed_file
from samestep.placement.place import KEY_NAME
from samestep.text import reason_of

DESCRIPTOR = "SAMESTEP_KEY_FD"
_BYTES = 32
_MARK = b"samestep key\n"
_WRITTEN_S = 5.0


def derive(key: bytes, *words: str | bytes) -> bytes:
    """A key or a proof for these words; it reveals nothing about `key`."""
    parts = [word.encode(errors="replace") if isinstance(word, str) else word for word in words]
    return hmac.digest(key, b"".join(len(part).to_bytes(4, "big") + part for part in parts), "sha256")


def key_of_run(env: Mapping[str, str], launcher: str) -> bytes:
    """The key that this process shares with the other processes of its run."""
    if launcher == "samestep" and (number := env.get(DESCRIPTOR)):
        return _inherited(number)
    return key_of_user(env)


def key_of_user(env: Mapping[str, str]) -> bytes:
    """SAMESTEP_KEY, or the key in a file of mode 0600 in the user's state directory; the file is made once."""
    if text := env.get("SAMESTEP_KEY"):
        if not re.fullmatch(f"[0-9a-fA-F]{{{2 * _BYTES}}}", text):
            raise PlacementError(
                f"SAMESTEP_KEY has {len(text)} characters, which is not a key; set it to {2 * _BYTES} random "
                "hexadecimal digits, such as those of `openssl rand -hex 32`",
                variable="SAMESTEP_KEY",
            )
        return bytes.fromhex(text)
    state = env.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    path = Path(state, "samestep", "key")
    try:
        make_private_directory(path.parent)
        return _create(path) or _read(path)
    except OSError as error:
        raise PlacementError(
            f"the key at {path} cannot be read or made ({reason_of(error)}); correct that, or set SAMESTEP_KEY "
            f"to the same {2 * _BYTES} random hexadecimal digits for every rank"
        ) from error


@contextmanager
def key_file(key: bytes, size: int) -> Iterator[int]:
    """While entered, the descriptor of an unnamed file with the key: only a worker that inherits it can read it."""
    with unnamed_file(_MARK + key, f"{KEY_NAME}{size}") as file:
        yield file.fileno()


def _inherited(number: str) -> bytes:
    try:
        descriptor = int(number)
        os.set_inheritable(descriptor, False)
        data = os.pread(descriptor, len(_MARK) + _BYTES + 1, 0)
    except (ValueError, OverflowError, OSError):
        data = b""
    if len(data) != len(_MARK) + _BYTES or not data.startswith(_MARK):
        raise PlacementError(
            f"this process did not inherit the run's key that {DESCRIPTOR} names, as a worker of `samestep run` does; "
            "if a worker started it, write samestep.init() and what follows below `if __name__ == '__main__':`, or "
            "start the other script with `samestep run`",
            variable=DESCRIPTOR,
        )
    return data.removeprefix(_MARK)


def _create(path: Path) -> bytes | None:
    """Write a new key; None if the file exists already."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return None
    key = secrets.token_bytes(_BYTES)
    with open(descriptor, "wb") as file:
        file.write(key)
        file.flush()
        os.fsync(descriptor)
    return key


def _read(path: Path) -> bytes:
    until = time.monotonic() + _WRITTEN_S
    while True:
        with open(open_regular(path), "rb") as file:
            facts, key = os.fstat(file.fileno()), file.read(_BYTES + 1)
        if facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
            raise PlacementError(
                f"{path} has owner {facts.st_uid} and mode {facts.st_mode & 0o7777:o}, so its key may not be this "
                "user's alone; delete it, and a new one is made"
            )
        if len(key) == _BYTES:
            return key
        if len(key) > _BYTES or time.monotonic() > until:
            raise PlacementError(
                f"{path} holds {len(key)} bytes, which is not a key; delete it, and a new one is made"
            )
        time.sleep(0.05)  # another process has just created the file and has not written the key yet
