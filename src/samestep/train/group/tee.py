"""A program that copies a rank's stdout and stderr to their old targets and to the rank's log.

Its arguments are the log, the two pipes, the rank's pid, and the file for its record of a failure. It ends when the
last process that writes to a pipe has ended. A rank that is killed can write no record, so this program does: its stdin
ends with the rank. It knows the signal only if it looks before the rank's parent does.
"""

import json
import os
import select
import signal
import sys
import time
from contextlib import suppress

_CHUNK = 1 << 16
_UNREAD = ", most likely: its process ended in the middle of the script and left no error"
_END_S = 0.5  # between the end of a rank's output and the end of its process
_STATUS = 49  # the place of the exit status in /proc/PID/stat, from the state on
_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # by which a launcher ends the other ranks


def main() -> None:
    """Copy until both pipes are closed."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
        with suppress(OSError):
            signal.signal(number, signal.SIG_IGN)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    log = os.open(sys.argv[1], flags, 0o600)
    out, err, pid = map(int, sys.argv[2:5])
    ends, is_unknown = {out: {1, log}, err: {2, log}}, True
    while ends:
        for source in select.select([*ends, *[0] * is_unknown], [], [])[0]:
            if source == 0:
                is_unknown = False
                _note_end(pid)
                continue
            if not (data := os.read(source, _CHUNK)):
                del ends[source]
            for end in set(ends.get(source, ())):
                if not _written(end, data):
                    ends[source].discard(end)
    if is_unknown and select.select([0], [], [], _END_S)[0]:
        _note_end(pid)


def _note_end(pid: int) -> None:
    """Record that the rank was killed, unless it has told that it is leaving by itself."""
    if os.read(0, 1) or (number := _signal_of(pid)) in _STOPS:
        return
    said, unread = signal.Signals(number or signal.SIGKILL), "" if number else _UNREAD
    failure = {"exception": f"killed by {said.name}{unread}", "code": 128 + said, "pid": pid}
    failure |= {"group": "", "cause": "", "frames": []}
    with suppress(OSError, ValueError, KeyError):
        with suppress(FileNotFoundError), open(sys.argv[5], "rb") as file:
            if json.load(file)["pid"] == pid:
                return
        how = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        with open(os.open(f"{sys.argv[5]}.new", how, 0o600), "w", encoding="utf-8") as new:
            json.dump(failure, new)
        os.replace(f"{sys.argv[5]}.new", sys.argv[5])


def _signal_of(pid: int) -> int:
    """The signal that ends this process; 0 if it is another end, or not known."""
    until = time.monotonic() + _END_S
    with suppress(OSError, IndexError), open(f"/proc/{pid}/stat", "rb", 0) as file:
        while time.monotonic() < until:
            status = os.pread(file.fileno(), _CHUNK, 0).rpartition(b")")[2].split()
            if status[0] == b"Z" or status[_STATUS] != b"0":
                return int(status[_STATUS]) & 0x7F
    return 0


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
