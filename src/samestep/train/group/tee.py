"""A program that copies a rank's stdout and stderr to their old targets and to the rank's log.

Its arguments are the log and the two pipes. It ends when the last process that writes to a pipe has ended.
"""

import os
import select
import signal
import sys
from contextlib import suppress

_CHUNK = 1 << 16


def main() -> None:
    """Copy until both pipes are closed."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
        with suppress(OSError):
            signal.signal(number, signal.SIG_IGN)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    log, out, err = os.open(sys.argv[1], flags, 0o600), int(sys.argv[2]), int(sys.argv[3])
    ends = {out: {1, log}, err: {2, log}}
    while ends:
        for pipe in select.select(list(ends), [], [])[0]:
            if not (data := os.read(pipe, _CHUNK)):
                del ends[pipe]
            for end in set(ends.get(pipe, ())):
                if not _written(end, data):
                    ends[pipe].discard(end)


def _written(end: int, data: bytes) -> bool:
    """Write all data; False if a full disk or a closed console prevents it, which ends only this copy."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(end, view) :]
        except BlockingIOError:
            select.select([], [end], [])
        except OSError:
            return False
    return True


if __name__ == "__main__":
    main()
