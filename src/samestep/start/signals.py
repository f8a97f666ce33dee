"""Signals to the launcher as numbers in a pipe, so that they arrive in its loop, not in the middle of it."""

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTSTP)


class Asked(Exception):
    """A signal that asks this process to end, where it waits for something else."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def ending_signals() -> Iterator[None]:
    """While entered, what asks this process to end raises Asked."""

    def end(number: int, _: object) -> None:
        raise Asked(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    heard = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, end) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def signals_as_bytes(numbers: Sequence[signal.Signals]) -> Iterator[int]:
    """While entered, these signals end nothing: their numbers can be read from this descriptor."""
    pipe, end = os.pipe()
    for descriptor in (pipe, end):
        os.set_blocking(descriptor, False)
    signal.set_wakeup_fd(end, warn_on_full_buffer=False)
    # What is ignored from the start (nohup, a shell's background job) stays so.
    heard = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, lambda *_: None) for number in heard}
    try:
        yield pipe
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(-1)
        os.close(pipe)
        os.close(end)
