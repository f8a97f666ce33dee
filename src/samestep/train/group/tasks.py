"""The run's directory where Slurm, MPI or torchrun started the ranks: rank 0 makes it, each rank keeps its output.

Covered: the output of a rank and its children from `init` on, also from C, and rank 0's exit code. Not covered: nodes
that do not see the directory; they go on without it.
"""

import ctypes
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE, Popen, TimeoutExpired

from samestep import rundir
from samestep.errors import UsageError
from samestep.placement.place import Placement
from samestep.rendezvous.member import say
from samestep.rendezvous.tree import Tree
from samestep.text import reason_of

_TEE = Path(__file__).with_name("tee.py")
_OUT_AND_ERR = (1, 2)
_LAST_WORDS_S = 1.0


def share_run(here: Placement, tree: Tree | None, limit_s: float) -> str | None:
    """Collective. The run's directory, made by rank 0 or named by the batch script; None if there is none."""
    by_hand = here.launcher == "torchrun" and "TORCHELASTIC_RUN_ID" not in os.environ
    if by_hand or here.launcher in ("alone", "samestep"):
        return None
    run = os.environ.get("SAMESTEP_RUN")
    if here.rank == 0:
        started = rundir.start_record([sys.executable, *sys.argv], here.size, time.time())
        try:
            if run:
                rundir.begin_run(Path(run), started)
            elif tree:
                run = str(rundir.create_run(None, os.environ, started))
        except (OSError, UsageError) as error:
            run, reason = None, reason_of(error) if isinstance(error, OSError) else error
            say(f"{reason}; the run goes on without a directory")
    return tree.gather(run, limit_s)[0] if tree else run


class Output:
    """Copies a rank's output, with a separate process, to its old target and to the rank's log."""

    def __init__(self, rank: int) -> None:
        self._tee: Popen[bytes] | None = None
        self._began = time.time()
        self._run, self._rank = rundir.own_run(os.environ, "logs"), rank
        if self._run is not None and rank == 0:
            _write_code_at_exit(self._run / rundir.EXIT_BYTE)
        if self._run is None or os.isatty(0):
            return
        pipes = [os.pipe() for _ in _OUT_AND_ERR]
        kept = [read for read, _ in pipes]
        log, record = rundir.log_path(self._run, rank), rundir.failure_path(self._run, rank)
        command = [sys.executable, "-I", "-S", *map(str, (_TEE, log, *kept, os.getpid(), record))]
        self._tee = Popen(command, bufsize=0, stdin=PIPE, pass_fds=kept, start_new_session=True)
        assert self._tee.stdin is not None
        # a forked child must not keep it open: its end tells that this process was killed
        os.register_at_fork(after_in_child=self._tee.stdin.close)
        self._before = [os.dup(number) for number in _OUT_AND_ERR]
        for number, (read, write) in zip(_OUT_AND_ERR, pipes, strict=True):
            os.close(read)
            os.dup2(write, number)
            os.close(write)

    def close(self) -> None:
        """Write the rest; later output goes only to its old target."""
        if self._tee is None:
            return
        self._tell_leaving()
        sys.stdout.flush()
        sys.stderr.flush()
        for number, before in zip(_OUT_AND_ERR, self._before, strict=True):
            os.dup2(before, number)
        with suppress(TimeoutExpired):  # a child of this rank may still hold the pipe
            self._tee.wait(_LAST_WORDS_S)

    def _tell_leaving(self) -> None:
        """Tell the process that copies the output that this process now ends by itself."""
        if self._tee is not None and self._tee.stdin is not None and not self._tee.stdin.closed:
            with suppress(OSError), self._tee.stdin as end:  # it may have ended
                end.write(b"x")

    def note_end(self, code: int) -> None:
        self._tell_leaving()
        if self._run is None or self._rank != 0:
            return
        record = {"exit_code": code, "seconds": round(time.time() - self._began, 3), "failure": None}
        with suppress(OSError):
            rundir.write_record(self._run / rundir.RESULT, record)


def _write_code_at_exit(path: Path) -> None:
    """Let the C library write this process's exit code as a byte: Python knows no code of `raise SystemExit(7)`."""
    with suppress(OSError, AttributeError):  # only glibc has on_exit
        number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        libc = ctypes.CDLL(None)
        libc.fdopen.restype = ctypes.c_void_p
        libc.on_exit(libc.fputc, ctypes.c_void_p(libc.fdopen(number, b"w")))
