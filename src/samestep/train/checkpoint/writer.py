"""Writes commits in the background from a copy of the state, and tells who writes them."""

import hashlib
import math
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import samestep
from samestep.placement.launchers import count
from samestep.rendezvous.member import say
from samestep.state.directory import CheckpointDirectory
from samestep.state.lease import Holder, this_process
from samestep.state.slots import Slots
from samestep.text import printable
from samestep.train.checkpoint import capture
from samestep.train.group.device import HostMemory, synchronize

_RESTARTS_OF_A_JOB = 1_000_000
# keeping the state in memory may take this share of the time; the first times it is done after so many steps
_SHARE = 0.01
_SOON = 5


class Writer:
    """Writes at most one commit at a time, and keeps the outcome of the latest."""

    def __init__(
        self,
        directory: CheckpointDirectory,
        device: torch.device,
        on_written: Callable[[float], None],
        slots: Slots | None = None,
    ) -> None:
        """`on_written` gets the seconds that a commit took; `slots` keep states in memory."""
        self.slots, self._is_remembering = slots, False
        self._remembered = 0, 0.0  # after which step, and when
        self._cost_s = 0.0  # of keeping the state in memory
        self.failure, self.left_out = "", False  # whether a commit was due while the one before was written
        self.committed: list[Any] = [0]
        self.begun_at = time.monotonic()
        self._directory, self._device, self._on_written = directory, device, on_written
        self._thread: threading.Thread | None = None
        self._held: tuple[Any, list[Any]] | None = None
        self._is_awaited = False
        self._copy = HostMemory(0, device)

    @property
    def is_writing(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def remembers_next(self, step: int) -> int:
        """The step after which to keep the state in memory again; 0 if it is not kept."""
        now, (before, then) = time.monotonic(), self._remembered
        self._remembered = step, now
        pace = (now - then) / (step - before) if then else self._cost_s
        return step + max(_SOON, math.ceil(self._cost_s / _SHARE / (pace or 1.0))) if self.slots else 0

    def is_free(self, is_patient: bool) -> bool:
        """Whether a commit can begin; a patient call waits for a running commit, every call for a copy into memory."""
        if self._thread is not None and (is_patient or self._is_remembering):
            self._thread.join()
        self.left_out = self.is_writing
        return not self.left_out

    def wait(self, *, is_end: bool = False) -> None:
        """Wait for the commit that is being written; with `is_end` also write the state that is held."""
        self._is_awaited = True
        if self._thread is not None:
            self._thread.join()
        if is_end and self._held:
            self._write(*self._held)

    def start(self, state: object, meta: Mapping[str, Any], place: list[Any], is_held: bool) -> None:
        """Copy the state and write it; then `committed` becomes `place`, which begins with the step."""
        # With `is_held` it is written at the end of the script, unless a later state comes before.
        packed = self._packed(state, meta, capture.bulk(state))
        self.begun_at, self._is_remembering = time.monotonic(), False
        if is_held:
            self._held = packed, place
        else:
            self._in_background(self._write, packed, place)

    def remember(self, state: object, meta: Mapping[str, Any], step: int, began: float) -> None:
        """Copy the state into the launcher's memory; its cost counts from `began`. `committed` does not change."""
        size = capture.bulk(state)
        if not self.slots or not self.slots.fit(size):
            self.slots = None
            return
        packed, self._is_remembering = self._packed(state, meta, size), True
        self._in_background(self._remember, packed, step, self.slots, time.monotonic() - began)

    def _in_background(self, write: Callable[..., None], *args: Any) -> None:
        self._thread = threading.Thread(target=write, args=args, name="samestep-commit")
        try:
            self._thread.start()
        except RuntimeError:  # this process may have no more threads
            self._thread = None
            write(*args)

    def _packed(self, state: object, meta: Mapping[str, Any], size: int) -> Any:
        self._is_awaited, self._held = False, None
        if len(self._copy.bytes) < size:
            self._copy = HostMemory(size, self._device)
        packed = capture.pack(state, meta, into=self._copy.bytes)
        synchronize(self._device)
        return packed

    def _remember(self, packed: Any, step: int, slots: Slots, cost_s: float) -> None:
        began = time.thread_time()
        try:
            self._directory.remember(packed, step, slots)
        except Exception as error:
            self.slots = None
            say(f"the state is not kept in memory ({error}); commits go on")
        # while this thread waits, the training goes on
        self._cost_s = cost_s + time.thread_time() - began

    def _write(self, packed: Any, place: list[Any]) -> None:
        begun = time.monotonic()
        try:
            self._directory.commit(packed, place[0])
        except Exception as error:
            # of any kind: a failed commit must never be taken for a written commit
            if not self.failure:
                say(f"{error}; training goes on and tries again")
            self.failure = str(error) or type(error).__name__
        else:
            self.failure, self.committed = "", place
            self._on_written(time.monotonic() - begun)
            if not self._is_awaited:
                self._copy.pin()


def holder(env: Mapping[str, str], directory: Path) -> tuple[Holder, Callable[[str], object], str]:
    """For the lease: this process, the function that tells that it waits, and the advice to a run that is refused."""
    # a job that was requeued keeps its number, and its job steps keep theirs
    job = f"{env['SLURM_JOB_ID']}.{env.get('SLURM_STEP_ID', '')}" if "SLURM_JOB_ID" in env else ""
    requeues, restarts = (count(env, f"{by}_RESTART_COUNT") for by in ("SLURM", "TORCHELASTIC"))
    remedy = "end that run first, or give each run a directory of its own"
    if "SLURM_ARRAY_TASK_ID" in env:
        remedy = (
            "give each element of the job array a directory of its own: "
            f"Checkpoint('{directory}-' + os.environ['SLURM_ARRAY_TASK_ID'], ...)"
        )
    return this_process(job, requeues * _RESTARTS_OF_A_JOB + restarts), say, remedy


def of_element(meta: Mapping[str, Any]) -> str:
    """Words on a commit that another element of a job array has made, else ""."""
    element = str(meta.get("element") or "")
    if element in ("", os.environ.get("SLURM_ARRAY_TASK_ID")):
        return ""
    what = f"element {printable(element)} of a job array committed"
    return f", which {what}; if the elements train different things, give each a directory of its own"


def origin() -> dict[str, Any]:
    script = Path(sys.argv[0]) if sys.argv and sys.argv[0] else Path("-")
    digest = hashlib.sha256(script.read_bytes()).hexdigest()[:12] if script.is_file() else ""
    return {
        "script": script.name,
        "digest": digest,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "samestep": samestep.__version__,
        "element": os.environ.get("SLURM_ARRAY_TASK_ID", ""),
    }
