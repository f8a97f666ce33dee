"""Signals to the launcher as numbers in a pipe, so that they arrive in its loop, not in the middle of it."""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


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

    with handled((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), end):
        yield


def hear_of_children() -> None:
    """Where SIGCHLD is ignored, as a parent may have left it, nobody learns how a child ended."""
    with suppress(ValueError):  # in a thread that is not the first
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)


@contextmanager
def signals_as_bytes(numbers: Sequence[signal.Signals]) -> Iterator[int]:
    """While entered, these signals end nothing: their numbers can be read from this descriptor."""
    pipe, end = os.pipe()
    for descriptor in (pipe, end):
        os.set_blocking(descriptor, False)
    signal.set_wakeup_fd(end, warn_on_full_buffer=False)
    try:
        with handled(numbers, lambda *_: None):
            yield pipe
    finally:
        signal.set_wakeup_fd(-1)
        os.close(pipe)
        os.close(end)


@contextmanager
def handled(numbers: Sequence[signal.Signals], handler: Callable[[int, object], None]) -> Iterator[None]:
    """While entered, these are handled so; what is ignored from the start (nohup, a background job) stays so."""
    heard = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in heard}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
