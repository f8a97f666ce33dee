"""Ends the workers of a launcher that has ended, even by SIGKILL: a process of its own, run as a file.

It reads `+PID` and `-PID` lines from its standard input. Where that ends, the groups still named are killed.
"""

import os
import select
import signal


def main() -> None:
    """Wait for the launcher's end, then end what it left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    launcher = os.getppid()
    groups: set[int] = set()
    rest = b""
    while True:
        # A process forked beside the launch may hold the pipe open too, so the parent is looked at as well.
        ready, _, _ = select.select([0], [], [], 0.5)
        if ready:
            data = os.read(0, 65536)
            if not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                group = int(line[1:])
                (groups.add if line[:1] == b"+" else groups.discard)(group)
        elif os.getppid() != launcher:
            break
    for group in groups:
        try:
            os.killpg(group, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


if __name__ == "__main__":
    main()
