"""How this process leaves its script, and what the other ranks hear of it.

Covered: the last line, `sys.exit`, `raise SystemExit`, `os._exit` with a code, an exception, Ctrl-C. Not covered:
signals, which the launcher or the other ranks see.
"""

import builtins
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from traceback import walk_tb
from types import TracebackType
from typing import Any, NoReturn

from samestep.errors import SamestepError
from samestep.failure import add_remedy, is_users, write_failure
from samestep.hang import EXCHANGE
from samestep.rendezvous.member import say
from samestep.train.group.control import LEFT, left_at, script_frame, users_line
from samestep.train.group.tasks import Output
from samestep.train.group.watch import MutualWatch

_LEAVE = timedelta(seconds=1)
_EXITS = ((sys, "exit"), (builtins, "exit"), (builtins, "quit"))


class Leaving:
    """Notes what ends the script from the moment it is made, and ends the process."""

    def __init__(self, group: Any, watch: MutualWatch | None, output: Output | None) -> None:
        self._group, self._watch, self._output = group, watch, output
        self.failed: int | None = None
        self.left = ""  # the line of sys.exit; "" again once the script goes on
        self.status: Any = None  # the argument of sys.exit
        # called before the traceback of a Ctrl-C is shown
        self.before_ctrl_c: Callable[[], None] | None = None
        self._pid, self._script = os.getpid(), script_frame()
        self._os_exit, self._excepthook = os._exit, sys.excepthook
        hooks: list[tuple[Any, str, Any]] = [
            (home, name, self._note_exit) for home, name in _EXITS if hasattr(home, name)
        ]
        hooks += [(os, "_exit", self._note_os_exit), (sys, "excepthook", self._note_failure)]
        self._hooks = [(home, name, getattr(home, name), hook) for home, name, hook in hooks]
        for home, name, _, hook in self._hooks:
            setattr(home, name, hook)

    @property
    def code(self) -> int:
        """The exit code with which this rank has left its script, by an exception or `sys.exit`; 0 before."""
        return self.failed or _code_of(self.status) if self._group.phase[0] == "end" else 0

    def note_end_of_script(self) -> None:
        """Local. Note that the script's last line has run; not in processes that it has forked."""
        if self._group.is_connected and self.failed is None and os.getpid() == self._pid:
            left = self.left or left_at(self._script)
            self.status = self.status if self.left else None  # the script may have caught it
            self._group.enter("end", left)
            self.left = left
            if code := _code_of(self.status):  # what keeps it from ending may keep the others waiting
                write_failure(os.environ, SystemExit(code), code)

    def meet(self) -> None:
        """Collective. Wait for the others for a moment; if they go on and this rank has an exit code, end them."""
        _, left = self._group.phase
        try:
            self._group.all_gather("the end of the script", patience=_LEAVE)
        except SamestepError:
            if self._watch is not None and (code := _code_of(self.status)):
                world = self._group.world
                say(f"rank {world.rank} of {world.size} {left} with exit code {code}")
                self._watch.end_all(code)

    def at_exit(self) -> None:
        """End the group at the end of the interpreter, without a call of the script."""
        # A failed rank does not wait for others: it exits at once with the code of its failure.
        error = getattr(sys, "last_value", None)
        if error is not None and sys.excepthook != self._note_failure and not hasattr(sys, "ps1"):
            self._record_failure(error)  # the script has put another hook in the place of this one
        if self._watch is not None:
            # `srun --kill-on-bad-exit` stops the ranks that leave last, and would give 143 for their own code
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if self._output is not None:
            # before the ranks come together: after it they end at once, and Slurm gives the code of the first
            self._output.close()
        if self.failed is not None:
            if self._watch is not None:
                self._watch.end_all(self.failed)
            self.end(self.failed)
        for child in multiprocessing.active_children():
            if child.daemon:
                # as Python does later; torch waits 5 s for a loader worker whose iterator is collected as garbage
                child.terminate()
        if not self._group.close():
            self._exit(1)
        self._note_end(_code_of(self.status))

    def end(self, code: int) -> NoReturn:
        """End this process now, without waiting for other ranks."""
        for child in multiprocessing.active_children():
            child.kill()
        self._exit(code)

    def remove_hooks(self) -> None:
        """Leave sys.exit, os._exit and sys.excepthook as they were, unless somebody has replaced them since."""
        for home, name, before, hook in self._hooks:
            if getattr(home, name) == hook:
                setattr(home, name, before)

    def _exit(self, code: int) -> NoReturn:
        self._note_end(code)
        sys.stdout.flush()
        sys.stderr.flush()
        self._os_exit(code)

    def _note_end(self, code: int) -> None:
        if self._output is not None:
            self._output.note_end(code)

    def _note_exit(self, *status: Any) -> NoReturn:
        """Replaces sys.exit: notes the line, and the exit code, in case the process ends."""
        self.left, self.status = f"{LEFT} {users_line()}", status[0] if status else None
        raise SystemExit(*status)

    def _note_os_exit(self, status: int) -> NoReturn:
        """Replaces os._exit: records the line and the exit code, which only the launcher would know."""
        if os.getpid() == self._pid and self._group.is_connected and self.failed is None:
            with suppress(Exception):
                self._group.enter("end", f"{LEFT} {users_line()}")
                if status:
                    write_failure(os.environ, SystemExit(status), status)
                self._note_end(status)
        self._os_exit(status)

    def _note_failure(
        self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        code = self._record_failure(error)
        if code == 130 and self.before_ctrl_c is not None:
            self.before_ctrl_c()
        show = partial(self._excepthook, kind, error, traceback)
        if self._watch is None or code != 1:
            show()
        else:
            self._watch.tell_failure(error, show)

    def _record_failure(self, error: BaseException) -> int:
        """Record the exception that ends the script; returns the exit code."""
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
        if self._group.is_connected:
            self.failed = code
            frames = [(step.f_code.co_filename, line) for step, line in walk_tb(error.__traceback__)]
            lines = [f" at {Path(file).name}:{line}" for file, line in frames if is_users(file)]
            # a thread may keep this process from ending, while other ranks wait for it
            failed_in = self._group.failed_exchange
            model = f" in {EXCHANGE} of {failed_in}" if failed_in else ""
            self._group.enter("end", f"failed with {type(error).__name__}{''.join(lines[-1:])}{model}")
        if self._watch is not None and (why := self._watch.cause_of(error)):
            error.add_note(f"samestep: {why}")
        add_remedy(error, self._group.world.rank, self._group.share)
        write_failure(os.environ, error, code)  # before it is shown: a script may have closed stderr
        return code


def _code_of(status: Any) -> int:
    """The exit code that Python makes of the argument of sys.exit."""
    return status & 0xFF if isinstance(status, int) else int(status is not None)
