"""Signals to the launcher as numbers in a pipe, so that they arrive in its loop, not in the middle of it."""

import os
import signal
from types import TracebackType
from typing import Any

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTSTP)


class Signals:
    """While entered, these signals end nothing: their numbers can be read from `fd`."""

    def __init__(self, numbers: tuple[signal.Signals, ...] = PASSED_ON) -> None:
        # What is ignored from the start (nohup, a shell's background job) stays so.
        self._numbers = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
        self._before: dict[signal.Signals, Any] = {}
        self.fd = self._end = -1

    def __enter__(self) -> "Signals":
        self.fd, self._end = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._end, False)
        signal.set_wakeup_fd(self._end, warn_on_full_buffer=False)
        for number in self._numbers:
            self._before[number] = signal.signal(number, lambda *_: None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(-1)
        os.close(self.fd)
        os.close(self._end)
