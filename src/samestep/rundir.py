"""The files of a run's directory: what was started, the logs, the pulses, the failures and the result."""

import json
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from errno import EPERM
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from zlib import crc32

from samestep import files
from samestep.errors import UsageError
from samestep.text import reason_of

_RECORD_BYTES = 4 << 20
_FOLDERS = ("logs", "pulse", "failures")
# At this signal a worker writes the Python stack of its threads, whether or not one of them holds the GIL. No library
# that torch users know uses it.
STACK_SIGNAL = signal.SIGRTMIN + 9 if hasattr(signal, "SIGRTMIN") else None
# The variables that hold the descriptors of the memory in which the launcher keeps rank 0's state.
SLOTS = ("SAMESTEP_SLOT_A", "SAMESTEP_SLOT_B")
CHECKPOINTED = 75  # the exit code that requests a restart
STARTED, RESULT = "run.json", "result.json"
EXIT_BYTE = "exit-byte"  # a file: rank 0's exit code, where no launcher of ours started it
STOP = "stop"  # a file that asks a run to commit, to end, and not to be restarted
TIME_UP = "time-is-up"  # a file: the run ended because its job's time was up
# The phases that are waits: a rank leaves them only when all other ranks have reached them too.
WAITS = ("exchange", "call")
COMPUTE = ("forward", "backward", "optimizer", "user", "evaluation")
PHASES = ("start", "data", *COMPUTE, *WAITS, "checkpoint", "end", "other")

# A pulse file holds _MAGIC, _OPENED, _RAISED, _ASKED, a checksum of _BEAT, and _BEAT. The checksum reveals a beat that
# is half written.
_MAGIC = b"pulse\0\0\x09"
_OPENED = struct.Struct("<16sid")  # device, process, seconds that a rank waits for another
_RAISED = struct.Struct("<i160s")  # the thread that writes this; the exception that the script handles now
_ASKED = struct.Struct("<I")  # how often another process has asked for the stacks of this one
# step, epoch, Unix and monotonic time, thread, phase, its begin, waits, call
_BEAT = struct.Struct("<qiddQI16sdQ160s")
_CHECKSUM = struct.Struct("<I")
_AT_RAISED = len(_MAGIC) + _OPENED.size
_AT_ASKED = _AT_RAISED + _RAISED.size
_AT_CHECKSUM = _AT_ASKED + _ASKED.size
_AT_BEAT = _AT_CHECKSUM + _CHECKSUM.size
_PULSE_BYTES = _AT_BEAT + _BEAT.size


class PulseReading(NamedTuple):
    """A worker's last beat: its step (-1: none yet), epoch, device, the time, and its phase since when."""

    step: int
    epoch: int
    device: str
    unix: float
    monotonic: float
    phase: str = "start"
    call: str = ""
    phase_began: float = 0.0
    waits: int = 0  # how many waits for other ranks it has begun, with the present wait
    pid: int = 0
    patience_s: float = 0.0
    raised: str = ""
    # Python's and the kernel's number of a thread that trains; 0: the main thread
    thread: tuple[int, int] = 0, 0
    watcher: int = (
        0  # the kernel's number of a thread of samestep, which answers, and which a signal does not disturb
    )


class Pulse:
    """A worker's pulse: a small file, mapped into memory, that other processes may read at any time."""

    def __init__(self, path: Path, device: str = "cpu", patience_s: float = 600.0) -> None:
        self._step, self._epoch, self._waits, self._patience_s = -1, 0, 0, patience_s
        self._memory = files.in_memory(path, _MAGIC, _PULSE_BYTES)
        self.stacks: BinaryIO | None = None  # where it writes the stacks of its threads if it is asked to
        self.follow(threading.current_thread())
        self.take(device)

    def take(self, device: str) -> None:
        """Write the device and the pid of this process, and enter the phase "start"."""
        _OPENED.pack_into(self._memory, len(_MAGIC), device.encode(), os.getpid(), self._patience_s)
        self.enter("start")

    def follow(self, thread: threading.Thread) -> None:
        """From the next beat on, write that this thread trains."""
        is_main = thread is threading.main_thread()
        self._thread = (0, 0) if is_main else (thread.ident or 0, thread.native_id or 0)

    def beat(self, step: int, epoch: int = 0) -> None:
        self._step, self._epoch = step, epoch
        self._write(time.monotonic())

    def enter(self, phase: str, call: str = "") -> None:
        """Write what this process does from now on: one of PHASES, and the call with its file and line."""
        now = time.monotonic()
        phase = phase if phase in PHASES else "other"
        self._waits += phase in WAITS
        self._phase = phase.encode(), now, self._waits, call.encode(errors="replace")
        self._write(now)

    @property
    def asked(self) -> int:
        """How often another process has asked for the stacks of this one."""
        return int(_ASKED.unpack_from(self._memory, _AT_ASKED)[0])

    def note_raised(self, raised: str) -> None:
        """Write this thread, and the exception that this process handles now, such as in `finally`; "": none."""
        _RAISED.pack_into(
            self._memory, _AT_RAISED, threading.get_native_id(), raised.encode(errors="replace")
        )

    def _write(self, now: float) -> None:
        beat = _BEAT.pack(self._step, self._epoch, time.time(), now, *self._thread, *self._phase)
        self._memory[_AT_CHECKSUM:] = _CHECKSUM.pack(crc32(beat)) + beat


def read_pulse(path: Path) -> PulseReading | None:
    """The last beat in a pulse file; None if no worker of this version has written it."""
    try:
        with open(files.open_regular(path, 2), "rb", buffering=0) as file:
            return pulse_in(file.fileno())
    except OSError:
        return None


def pulse_in(file: int) -> PulseReading | None:
    """The last beat in an open pulse file; raises OSError."""
    for _ in range(8):
        data = os.pread(file, _PULSE_BYTES + 1, 0)
        if len(data) != _PULSE_BYTES or not data.startswith(_MAGIC):
            return None
        if _CHECKSUM.unpack_from(data, _AT_CHECKSUM)[0] == crc32(data[_AT_BEAT:]):
            break
    else:
        return None
    device, pid, patience_s = _OPENED.unpack_from(data, len(_MAGIC))
    step, epoch, unix, monotonic, number, native, *rest = _BEAT.unpack_from(data, _AT_BEAT)
    phase, phase_began, waits, call = rest
    watcher, raised = _RAISED.unpack_from(data, _AT_RAISED)
    texts = (text.rstrip(b"\0").decode(errors="ignore") for text in (device, phase, call, raised))
    device, phase, call, raised = texts
    beat = (step, epoch, device, unix, monotonic, phase, call, phase_began, waits, pid, patience_s)
    return PulseReading(*beat, raised, (number, native), watcher)


def ask_for_stacks(file: int) -> None:
    """Ask the worker of an open pulse file to write the stacks of its threads; raises OSError."""
    asked = int.from_bytes(os.pread(file, _ASKED.size, _AT_ASKED), "little")
    os.pwrite(file, _ASKED.pack((asked + 1) % 2**32), _AT_ASKED)


def log_path(run: Path, rank: int) -> Path:
    return run / "logs" / f"rank-{rank}.log"


def stack_path(run: Path, rank: int) -> Path:
    """The file to which a rank writes its Python stacks when it is asked to."""
    return run / "logs" / f"rank-{rank}.stack"


def pulse_path(run: Path, rank: int) -> Path:
    return run / "pulse" / f"rank-{rank}"


def failure_path(run: Path, rank: int) -> Path:
    return run / "failures" / f"rank-{rank}.json"


def pulse_of(env: Mapping[str, str], rank: int) -> Path | None:
    """The file of this worker's pulse; None outside a run's directory."""
    run = own_run(env, "pulse")
    return pulse_path(run, rank) if run else None


def step_times_path(run: Path, rank: int) -> Path:
    return pulse_path(run, rank).with_name(f"steps-{rank}")


def step_times_of(env: Mapping[str, str], rank: int) -> Path | None:
    """The file of this worker's step times; None outside a run's directory."""
    pulse = pulse_of(env, rank)
    return step_times_path(pulse.parents[1], rank) if pulse else None


def own_run(env: Mapping[str, str], folder: str) -> Path | None:
    """The directory of this worker's run; None unless the directory and this folder in it belong to this user."""
    run = Path(env.get("SAMESTEP_RUN") or os.devnull)
    return run if files.is_own_directory(run) and files.is_own_directory(run / folder) else None


def start_record(argv: Sequence[str], size: int, began: float) -> dict[str, object]:
    return {
        "argv": list(argv),
        "size": size,
        "host": os.uname().nodename,
        "pid": os.getpid(),
        "started": began,
        "cwd": os.getcwd(),
        "slurm_job": os.environ.get("SLURM_JOB_ID"),
        "versions": {"python": sys.version.split()[0]},
    }


def begin_run(run: Path, started: Mapping[str, Any]) -> None:
    """Begin a run in this directory, or continue there after a requeue; raises OSError."""
    for folder in (run, *(run / part for part in _FOLDERS)):
        files.make_private_directory(folder)
        if not files.is_own_directory(folder):
            raise PermissionError(EPERM, "it is another user's or a link", str(folder))
    for old in (run / RESULT, run / EXIT_BYTE, run / TIME_UP, *(run / "failures").glob("*")):
        old.unlink(missing_ok=True)
    write_record(run / STARTED, started)


def create_run(root: str | None, env: Mapping[str, str], started: Mapping[str, Any]) -> Path:
    """Make a run's directory under --run-dir, $SAMESTEP_RUN_DIR or ./runs, and write run.json."""
    parent = Path(root or env.get("SAMESTEP_RUN_DIR") or "runs").absolute()
    now = time.localtime()
    minute, second = time.strftime("%m%d-%H%M", now), time.strftime("%m%d-%H%M%S", now)
    try:
        files.make_private_directory(parent)
        for name in (minute, second, *(f"{second}-{k}" for k in range(2, 10_000))):
            with suppress(FileExistsError):
                (parent / name).mkdir(mode=0o700)
                break
        else:
            raise FileExistsError(f"10000 runs began within one second in {parent}")
        run = parent / name
        begin_run(run, started)
    except OSError as error:
        raise UsageError(
            f"run directory {parent} cannot be written ({reason_of(error)}); name another with --run-dir"
        ) from error
    return run


def scratch_advice(run: Path, env: Mapping[str, str]) -> str | None:
    """Advice to use $SCRATCH, if the site has it and the run's files go to the home directory."""
    home, scratch = env.get("HOME"), env.get("SCRATCH")
    if not home or not scratch or not os.path.isdir(scratch):
        return None
    real = Path(os.path.realpath(run))
    in_home, in_scratch = (real.is_relative_to(os.path.realpath(place)) for place in (home, scratch))
    if not in_home or in_scratch:
        return None
    return f"the run's files go to {run.parent} in the home directory; SAMESTEP_RUN_DIR={scratch} is made for them"


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    files.write_atomically(path, (json.dumps(record, indent=1) + "\n").encode(), 0o600)


def read_record(path: Path) -> dict[str, Any] | None:
    """Read run.json or result.json; None if there is no valid file."""
    try:
        record = json.loads(files.read_regular(path, _RECORD_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None
