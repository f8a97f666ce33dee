"""Records of failures: a worker writes one into the run's directory, and its launcher reads it; no torch."""

import gc
import json
import linecache
import os
import re
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from errno import EAGAIN
from itertools import dropwhile
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from samestep.files import write_atomically
from samestep.rundir import failure_path, own_run, pulse_path, read_pulse, read_record
from samestep.text import duration, printable

_MOST_FRAMES = 20
_MOST_CHARACTERS = 1 << 14
_STANDARD = os.path.dirname(os.__file__) + os.sep
_OURS = os.path.dirname(__file__) + os.sep
_AUTOGRAD = "/torch/autograd/graph.py"  # calls the engine
_WAITING = re.compile(r"/torch/(distributed/|nn/parallel/distributed\.py$)")
# The wait of a collective that was begun with async_op=True has no frame of its own.
_WORKS_WAIT = re.compile(r"(?<!\bos)\.wait\(")

# An echo: an error that a rank raises because another rank has failed. It must also be torch's or samestep's own, since
# a server of the script may refuse or reset connections too.
_OF_RANKS = re.compile(r"RuntimeError\b|torch\.distributed\.|samestep\.")
_ECHO = re.compile(
    r"closed by peer|reset by peer|[Bb]roken pipe|remote process exited|Connection refused"
    r"|failed to recv, got 0 bytes|DistNetworkError|DistBackendError|RankMissing"
    r"|[Tt]imed? ?out waiting|[Ss]ocket [Tt]imeout|RanksDiffer.* at the end of the script"
)


class Frame(NamedTuple):
    file: str
    line: int
    name: str
    code: str = ""

    @property
    def place(self) -> str:
        """As `train.py:28`."""
        return f"{printable(Path(self.file).name)}:{self.line}"

    @property
    def doing(self) -> str:
        """What a process in this frame does: `is in read_shard (data.py:17)`."""
        return f"is at {self.place}" if self.name == "<module>" else f"is in {self.name} ({self.place})"


class Failure(NamedTuple):
    """A record: the last lines of the exception, of its group and of its cause, the user's frames, the exit code."""

    # `ranks` are those that differ from the others, if the exception names them; `handled` is the exception that the
    # script was handling when this one was raised.

    exception: str
    group: str
    cause: str
    frames: tuple[Frame, ...]
    code: int
    ranks: tuple[int, ...] = ()
    handled: str = ""


_TOO_MANY = (
    "this process may start no more threads or processes (`ulimit -u`, or pids.max of a container or job); raise that "
    "limit, or use fewer loader workers"
)
_OF_TORCHS_LOAD = "torch/serialization.py"
_OF_TORCHS_LOADER = "torch/utils/data/dataloader.py"
_IF_WORKER_ENDED = "a loader worker has ended, perhaps by a signal, while this process took a batch from it"
_IF_WRITTEN = (
    "if rank 0 writes this file, other ranks have to wait for it: write it with samestep.save, or make it in `with "
    "samestep.first():`"
)
_OF_SIZES = re.compile("size|shape|dimension")
_IF_SIZED = (
    "this rank has {0} of the batch's {1} samples; if {1} stands for the size of a batch here, write x.size(0) of the "
    "input"
)
_IF_PADDED = (
    "with same=True pad_packed_sequence pads to the whole batch's longest sequence, and a maximum of lengths is this "
    "rank's; take the size from what it returned, as out.size(1)"
)
# Words in errors that lines of a serial or hand-written script cause, and what to write instead.
_REMEDIES = {
    "has no attribute 'module'": "replicate returns the model itself; write model where model.module stands",
    "has no attribute 'no_sync'": "write `with samestep.no_sync(model):`",
    "DistributedDataParallel device_ids and output_device": "leave device_ids out: a process has one device",
    "Expected more than 1 value per channel when training": (
        "this rank's share of the batch is one sample; replicate(model, sync_batchnorm=True) takes BatchNorm's "
        "statistics from the whole batch"
    ),
    "SyncBatchNorm layers only work with GPU": (
        "leave convert_sync_batchnorm out, and write replicate(model, sync_batchnorm=True), which works on a CPU too"
    ),
    "unable to allocate shared memory": (
        "/dev/shm is too small for what loader workers hand over; make it larger (`docker run --shm-size=8g`), or use "
        "fewer workers"
    ),
    "Unable to find address for": (
        "this machine has no such network interface with an address; correct GLOO_SOCKET_IFNAME, or leave it unset"
    ),
    "can't start new thread": _TOO_MANY,
    os.strerror(EAGAIN): _TOO_MANY,
    "has no attribute 'set_epoch'": "each pass over a loader is the next epoch; leave set_epoch out",
    "'Checkpoint' object has no attribute 'save'": "step() commits when it is time, commit() now",
    "'Checkpoint' object has no attribute 'load'": "resume() loads the newest commit",
    "load() got an unexpected keyword argument 'map_location'": "samestep.load gives tensors on the CPU; leave it out",
    "has no attribute 'is_main_process'": "write world.rank == 0",
    "'World' object has no attribute 'world_size'": "write world.size",
    "'World' object has no attribute 'num_processes'": "write world.size",
    "'World' object has no attribute 'process_index'": "write world.rank",
    "'World' object has no attribute 'global_rank'": "write world.rank",
    "'World' object has no attribute 'local_process_index'": "write world.local_rank",
    "'World' object has no attribute 'node_rank'": "write world.node",
    "steps() missing 1 required keyword-only argument: 'microbatch'": (
        "write steps(dataset, batch_size=64, microbatch=8), or samestep.loader for batches that are not split"
    ),
}


def add_remedy(error: BaseException, rank: int = 0, share: tuple[int, int] = (0, 0)) -> None:
    """Add to a known exception of another library, on this rank, what to write instead."""
    # share: this rank's number of samples in the batch at hand, and that of all ranks.
    said = [remedy for words, remedy in _REMEDIES.items() if words in str(error)]
    is_torn = isinstance(error, EOFError | FileNotFoundError) or "PytorchStreamReader" in str(error)
    if rank and is_torn and any(step.file.endswith(_OF_TORCHS_LOAD) for step in _steps(error)):
        said.append(_IF_WRITTEN)
    if isinstance(error, ConnectionError | EOFError) and any(
        step.file.endswith(_OF_TORCHS_LOADER) for step in _steps(error)
    ):
        said.append(_IF_WORKER_ENDED)
    mine, batch = share
    is_of_sizes = type(error) in (RuntimeError, ValueError) and bool(_OF_SIZES.search(str(error)))
    names = [set(frame.f_code.co_names) for frame, _ in traceback.walk_tb(error.__traceback__)]
    if is_of_sizes and mine < batch and any({"pad_packed_sequence", "max"} <= used for used in names):
        said.append(_IF_PADDED)
    numbers = re.findall(r"\d+", str(error))
    # a view that does not fit names the number of elements, not that of samples
    has_share = str(mine) in numbers or "invalid for input of size" in str(error)
    if is_of_sizes and mine < batch and str(batch) in numbers and has_share:
        said.append(_IF_SIZED.format(mine, batch))
    if said and not getattr(error, "__notes__", None):
        error.add_note(f"samestep: {said[0]}")


def is_echo(exception: Sequence[str]) -> bool:
    """Whether the lines of an exception only say that another rank has ended."""
    return bool(exception) and bool(_OF_RANKS.match(exception[0])) and any(map(_ECHO.search, exception))


def is_users(file: str) -> bool:
    """Whether this file is the user's own, not a library's."""
    if file.startswith("<") or "site-packages" in file or "dist-packages" in file:
        return False
    return not file.startswith((_STANDARD, _OURS))


def stack_of(frame: FrameType | None) -> Iterator[Frame]:
    """This frame and those that called it, the innermost first."""
    while frame:
        code = frame.f_code
        # an instruction that Python has added may have no line, which another thread can see
        yield Frame(code.co_filename, frame.f_lineno or code.co_firstlineno, code.co_name)
        frame = frame.f_back


def frames_of_thread(ident: int) -> list[Frame]:
    """The frames of another thread that runs Python, the innermost first."""
    with _no_collection():
        return list(stack_of(sys._current_frames().get(ident)))


def handled_by_thread(ident: int) -> BaseException | None:
    """The exception that another thread handles."""
    with _no_collection():
        active: Any = sys._current_exceptions().get(ident)
    # before Python 3.12 it is as from sys.exc_info
    error: BaseException | None = active[1] if isinstance(active, tuple) else active
    return error


@contextmanager
def _no_collection() -> Iterator[None]:
    """Context manager: no garbage is collected."""
    # Python 3.11 may collect while it makes the object of a frame. Destructors then let the frame's thread go on, and
    # Python writes into the memory of a frame that has ended.
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def users_frame(stack: Iterable[Frame]) -> Frame | None:
    """The innermost frame in a file of the user; None if there is none, as after the script's end."""
    return next((frame for frame in stack if is_users(frame.file)), None)


def torchs_wait(stack: Sequence[Frame], thread: int) -> str:
    """The call of torch.distributed or DDP in which this thread waits, with its line; "" if it is in none."""
    frame = users_frame(stack)
    if frame is None:
        return ""
    innermost = stack[0]
    if innermost.file.endswith(_AUTOGRAD):
        return f"DDP's backward ({frame.place})" if _is_in_exchange(thread) else ""
    if not _WAITING.search(innermost.file):
        code = linecache.getline(innermost.file, innermost.line)
        return f"Work.wait ({frame.place})" if _WORKS_WAIT.search(code) else ""
    name = "DDP's forward" if "/nn/" in innermost.file else innermost.name
    return f"{name} ({frame.place})"


def _is_in_exchange(thread: int) -> bool:
    """Whether this thread, which is in backward, sleeps, and no thread of autograd for a device computes instead."""
    # DDP waits in backward for the other ranks, in C++; computing on the CPU, the thread sleeps for moments only
    with suppress(OSError):
        names = [(task / "comm").read_text() for task in Path(f"/proc/{thread}/task").iterdir()]
        state = Path(f"/proc/{thread}/stat").read_text().rpartition(")")[2].split()[0]
        return state == "S" and not any(name.startswith("pt_autograd") for name in names)
    return False


def heading(script: str, rank: int, size: int, place: str, seconds: float, step: int | None) -> str:
    when = duration(seconds) + ("" if step is None else f", in step {step}")
    return f"{printable(script)} failed on rank {rank} of {size} ({printable(place)}) after {when}"


def typed(path: Path) -> str:
    """A path as a user would type it here."""
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, FileNotFoundError):  # outside the working directory, or that was removed
        return str(path)


def write_failure(env: Mapping[str, str], error: BaseException, code: int) -> None:
    """Record that this process ends with `code` for this exception; never raises, never hides the exception."""
    # Of SystemExit the code alone is recorded.
    if (run := own_run(env, "failures")) is None:
        return
    with suppress(Exception):
        rank = int(env.get("RANK", "0"))
        pulse = read_pulse(pulse_path(run, rank))
        record = failure_of(error, code)._asdict() | {
            "type": type(error).__qualname__,
            "rank": rank,
            "step": pulse.step if pulse and pulse.step >= 0 else None,
            "call": pulse.call if pulse else "",
            "pid": os.getpid(),
            "time": time.time(),
        }
        write_atomically(failure_path(run, rank), json.dumps(record, indent=1).encode(), 0o600)


def failure_of(error: BaseException, code: int) -> Failure:
    first = error
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    cause = first.__cause__ or (None if first.__suppress_context__ else first.__context__)
    group = "" if first is error else _text(error)
    frames = tuple(_frames(first) or _frames(error))
    ranks = tuple(getattr(first, "ranks", ()))
    said = "" if isinstance(first, SystemExit) else _text(first)
    return Failure(said, group, _text(cause) if cause else "", frames, code, ranks, _handled(first))


def read_failure(path: Path, pid: int) -> Failure | None:
    """The record that the process `pid` wrote; None if it wrote none."""
    record = read_record(path)
    if record is None or record.get("pid") != pid:
        return None
    try:
        frames = tuple(Frame(*frame) for frame in record["frames"])
        exception, group, cause = (str(record[name]) for name in ("exception", "group", "cause"))
        ranks, handled = tuple(record.get("ranks", ())), str(record.get("handled", ""))
        return Failure(exception, group, cause, frames, int(record["code"]), ranks, handled)
    except (KeyError, TypeError, ValueError):
        return None


def _handled(error: BaseException) -> str:
    """The script's exception during whose handling, as in `finally`, this one was raised, with its line."""
    # No exception that only says what happened to another rank.
    before = error.__context__
    while before is not None:
        lines, frames = _text(before).splitlines(), [step for step in _steps(before) if is_users(step.file)]
        if frames and not hasattr(before, "ranks") and not is_echo(lines):
            return f"{lines[0]} ({frames[-1].place})"
        before = before.__context__
    return ""


def _text(error: BaseException) -> str:
    """The exception's type and message as a traceback ends with them, shortened in the middle."""
    # A SyntaxError begins with the lines of its place, which is a frame here.
    lines = dropwhile(lambda line: line.startswith("  "), traceback.format_exception_only(error))
    text = "".join(lines).rstrip()
    if len(text) <= _MOST_CHARACTERS:
        return text
    half = _MOST_CHARACTERS // 2
    return f"{text[:half]}\n...\n{text[-half:]}"


def _steps(error: BaseException) -> list[Frame]:
    steps = traceback.walk_tb(error.__traceback__)
    return [Frame(frame.f_code.co_filename, line or 0, frame.f_code.co_name) for frame, line in steps]


def _frames(error: BaseException) -> list[Frame]:
    """The frames in the user's files, the innermost last; if there are none, the last frame of all."""
    # Where a library raises an error from one that the script raised in a call by that library, the frames of the
    # latter.
    frames, caused = _steps(error), _steps(error.__cause__) if error.__cause__ else []
    own, of_cause = ([frame for frame in some if is_users(frame.file)] for some in (frames, caused))
    is_librarys = bool(frames) and not is_users(frames[-1].file)
    chosen = ((is_librarys and of_cause) or own)[-_MOST_FRAMES:] or frames[-1:]
    shown = [frame._replace(code=linecache.getline(frame.file, frame.line).strip()[:400]) for frame in chosen]
    if isinstance(error, SyntaxError) and error.filename:
        shown.append(Frame(error.filename, error.lineno or 0, "", (error.text or "").strip()))
    return shown
