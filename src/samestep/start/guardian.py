"""A separate process that kills a launcher's workers when the launcher has ended, even by SIGKILL; run as a file.

It reads `+PID` and `-PID` lines from standard input. At the end of input it kills the process groups still listed.
"""

import os
import select
import signal


def main() -> None:
    """Wait for the launcher's end, then kill the workers that it left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    launcher = os.getppid()
    groups: set[int] = set()
    rest = b""
    while True:
        # Another child of the launcher may keep the pipe open, so the parent is checked too.
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
