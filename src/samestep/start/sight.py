"""Finds out from outside what a process does: its state in /proc, and its Python stack even while it holds the GIL."""

import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import psutil

from samestep.failure import Frame, torchs_wait, users_frame
from samestep.rundir import STACK_SIGNAL, PulseReading, ask_for_stacks
from samestep.tracebacks import stack_in

_ANSWER_S = 2.0  # for a process to write its stacks
_VAIN_TURNS = 20  # of a thread that waits for the GIL; one that runs Python gives it away at the first
_POLL_S = 0.01
_LOADING = "/torch/utils/data/dataloader.py"
_WORKS, _FETCHES = "/torch/utils/data/_utils/worker.py", "/torch/utils/data/_utils/fetch.py"
_PROCESSES = "/multiprocessing/"
_MOST_BYTES = 1 << 20
_MOST_FRAMES = 100  # faulthandler writes at most so many frames of a thread
_OUTERMOST = ("<module>", "_bootstrap")  # of the main thread while it is in the script, and of other threads
STOPPED = "is stopped (SIGSTOP)"
_STATES = {
    psutil.STATUS_STOPPED: STOPPED,
    psutil.STATUS_TRACING_STOP: "is stopped by a debugger",
    psutil.STATUS_DISK_SLEEP: "is in uninterruptible sleep (D)",
    psutil.STATUS_ZOMBIE: "has ended",
}


class Sight(NamedTuple):
    """What a process does, and the line of the user's code where it is."""

    does: str = ""
    frame: Frame | None = None
    wait: str = ""  # the call of torch.distributed in which it waits, with its line
    has_left: bool = False  # whether its main thread is past the end of the script


def look_at(pulse: PulseReading, asks: int, stacks: int | None) -> Sight:
    """What a rank does, from the stack of its thread that trains, or from its loader worker's, in `stacks`.

    The rank is asked for it in its open pulse file `asks`.
    """
    pid = pulse.pid
    if does := _state(pid):
        return Sight(does)
    before = switches(pid, pulse.thread[1])
    dump = _asked(pid, asks, stacks, pulse.watcher)
    stack = stack_in(dump, pulse.thread[0])
    frame = users_frame(stack)
    if dump and len(stack) < _MOST_FRAMES and not any(outer.name in _OUTERMOST for outer in stack):
        at = "" if not stack else f", and {(frame or stack[0]).doing}"
        if stack and stack[0].name == "_shutdown":  # where Python waits for threads
            threads = (users_frame(stack_in(part)) for part in dump.split("\n\n"))
            of_thread = next(filter(None, threads), None)
            thread_is = f"its thread, which {of_thread.doing}" if of_thread else "a thread that is no daemon"
            at = f", and waits for {thread_is}"
        elif any(outer.name == "_exit_function" and _PROCESSES in outer.file for outer in stack):
            at = ", and waits for a process of multiprocessing"
        return Sight(f"has come to the end of the script{at}", frame, has_left=True)
    for worker in _children(pid) if any(_LOADING in outer.file for outer in stack) else ():
        waits = f"waits for its loader worker (pid {worker}), which"
        if does := _state(worker):
            return Sight(f"{waits} {does}", frame)
        if own := _working_at(stack_in(_signalled(worker, stacks))):
            return Sight(f"{waits} {own.doing}", own)
    has_slept = switches(pid, pulse.thread[1]) == before
    wait = torchs_wait(stack, pulse.thread[1] or pid) if has_slept else ""
    return Sight(frame.doing if frame else "does not answer", frame, wait)


def _working_at(stack: Sequence[Frame]) -> Frame | None:
    """Where a loader worker is; None if it is idle. The frames below are its rank's, from before the fork."""
    own = list(takewhile(lambda frame: _WORKS not in frame.file, stack))
    return users_frame(own) or (own[0] if any(_FETCHES in frame.file for frame in own) else None)


def switches(pid: int, thread: int = 0) -> int:
    """Context switches of this thread, or of the main thread where it has ended; unchanged while in one system call."""
    for number in (thread or pid, pid):
        with suppress(psutil.Error):
            return sum(psutil.Process(number).num_ctx_switches())
    return -1


def _state(pid: int) -> str:
    """In words, why a process cannot run; "" if it can."""
    if status_of(pid) == psutil.STATUS_DISK_SLEEP:  # every read of a file is in this state for a moment
        time.sleep(5 * _POLL_S)
    return _STATES.get(status_of(pid), "")


def status_of(pid: int) -> str:
    """The state of a process as psutil names it; a process that is gone counts as a zombie."""
    try:
        return str(psutil.Process(pid).status())
    except psutil.Error:
        return str(psutil.STATUS_ZOMBIE)


def _asked(pid: int, asks: int, stacks: int | None, watcher: int) -> str:
    """The stacks that a rank's watching thread writes when it is asked, or at a signal if it cannot get the GIL."""
    # A signal makes a thread write without the GIL. That is safe where another holds the GIL in C, since then no frame
    # changes. While a thread runs Python it would read frames that end meanwhile, and the process would crash.
    if stacks is None or not os.path.exists(f"/proc/{pid}/task/{watcher}"):
        return _signalled(pid, stacks)
    before, turns = os.fstat(stacks).st_size, switches(watcher)
    with suppress(OSError):  # the file is gone
        ask_for_stacks(asks)
    if text := _written(stacks, before, lambda: switches(watcher) - turns > _VAIN_TURNS):
        return text
    return _signalled(pid, stacks, watcher) if switches(watcher) - turns > _VAIN_TURNS else ""


def _signalled(pid: int, stacks: int | None, thread: int = 0) -> str:
    """The stacks that the process writes when this thread gets the signal; "" if it does not handle it."""
    if STACK_SIGNAL is None or stacks is None or not _listens(pid):
        return ""
    before = os.fstat(stacks).st_size
    with suppress(OSError):
        # Linux gives a signal to the thread of this number, if it can; in the main thread it would end a `sleep` of C
        os.kill(thread or pid, STACK_SIGNAL)
    return _written(stacks, before)


def _written(stacks: int, before: int, is_vain: Callable[[], bool] = lambda: False) -> str:
    """What is written behind the first bytes of this file, as soon as it does not grow any more."""
    until, text = time.monotonic() + _ANSWER_S, ""
    while time.monotonic() < until and (text or not is_vain()):
        time.sleep(_POLL_S)
        now = os.pread(stacks, _MOST_BYTES, before).decode(errors="replace")
        if now and now == text:
            break
        text = now
    return text


def _listens(pid: int) -> bool:
    """Whether the process handles the signal; it would end a process that does not."""
    with suppress(OSError):
        caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        return caught is not None and bool(int(caught[1], 16) >> (int(STACK_SIGNAL or 1) - 1) & 1)
    return False


def _children(pid: int) -> list[int]:
    with suppress(psutil.Error):
        return [child.pid for child in psutil.Process(pid).children()]
    return []
