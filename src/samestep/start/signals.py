"""Turns signals to the launcher into bytes in a pipe, so that its loop reads them at a safe point."""

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class StopRequested(Exception):
    """A signal asked this process to end while it waited for something else."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def ending_signals() -> Iterator[None]:
    """While entered, SIGINT, SIGTERM and SIGHUP raise StopRequested."""

    def end(number: int, _: object) -> None:
        raise StopRequested(number)

    with handling((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), end):
        yield


def restore_sigchld() -> None:
    """Restore SIGCHLD's default: a parent may have left it ignored, and then no exit status of a child is kept."""
    with suppress(ValueError):  # signals can only be set in the main thread
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)


@contextmanager
def signals_as_bytes(numbers: Iterable[signal.Signals]) -> Iterator[int]:
    """While entered, these signals have no effect but their numbers, which can be read from this descriptor."""
    pipe, end = os.pipe()
    for descriptor in (pipe, end):
        os.set_blocking(descriptor, False)
    signal.set_wakeup_fd(end, warn_on_full_buffer=False)
    try:
        with handling(numbers, lambda *_: None):
            yield pipe
    finally:
        signal.set_wakeup_fd(-1)
        os.close(pipe)
        os.close(end)


@contextmanager
def handling(numbers: Iterable[signal.Signals], handler: Callable[[int, object], None]) -> Iterator[None]:
    """While entered, `handler` handles these signals; a signal that was ignored (nohup, a background job) stays so."""
    not_ignored = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in not_ignored}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
