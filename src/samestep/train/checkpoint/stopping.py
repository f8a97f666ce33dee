"""How a run is asked to stop: a signal, a time limit or a file raises a flag; nothing is done in a handler."""

import math
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

from samestep.rundir import stop_path, time_up_path

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopRequests:
    """What this process has heard."""

    def __init__(self) -> None:
        self.heard: int | None = None
        self._end = _moment("SLURM_JOB_END_TIME")
        begun = _moment("SLURM_JOB_START_TIME") or time.time()
        self.job_seconds = self._end - begun if self._end is not None else math.inf
        run = os.environ.get("SAMESTEP_RUN")
        self._run = Path(run) if run else None
        if threading.current_thread() is threading.main_thread():
            # what is ignored from the start (SIGINT in a shell's background job) stays so
            for one in _SIGNALS:
                if signal.getsignal(one) is not signal.SIG_IGN:
                    signal.signal(one, self._hear)

    def asked(self, margin_seconds: float) -> str:
        """Why this process should stop now, or nothing; the job's time limit counts the margin before it."""
        if self.heard is not None:
            return signal.Signals(self.heard).name
        if self._end is not None and time.time() > self._end - margin_seconds:
            if self._run is not None:
                # a launcher that started the run again would do it in vain
                with suppress(OSError):
                    time_up_path(self._run).touch()
            return "the job's time limit"
        if self._run is not None and stop_path(self._run).exists():
            return "samestep stop"
        return ""

    def fulfilled(self) -> None:
        """The state is safe: a launcher that now stops the others must not change this process's exit code."""
        for one in _SIGNALS:
            signal.signal(one, signal.SIG_IGN)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.heard == signal.SIGINT == number:
            raise KeyboardInterrupt
        self.heard = number


def _moment(name: str) -> float | None:
    text = os.environ.get(name, "")
    return float(text) if text.isdecimal() else None
