"""Writes commits in the background: a copy of the state is taken at once, the training goes on."""

import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from samestep.state.directory import CheckpointDirectory
from samestep.train.checkpoint import capture


class Writer:
    """At most one commit is under way; how the last one ended is kept."""

    def __init__(
        self, directory: CheckpointDirectory, device: torch.device, on_written: Callable[[float], None]
    ) -> None:
        """`on_written` is told in seconds how long a commit took."""
        self.failure = ""
        self.committed: list[Any] = [0]
        self.begun_at = time.monotonic()
        self._directory, self._device, self._on_written = directory, device, on_written
        self._thread: threading.Thread | None = None
        self._copy = torch.empty(0, dtype=torch.uint8)

    @property
    def is_writing(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Wait for the commit that is under way, if there is one."""
        if self._thread is not None:
            self._thread.join()

    def start(self, state: object, meta: Mapping[str, Any], place: list[Any]) -> None:
        """Copy the state and write it; `place` is `committed` once that was done, and begins with the step."""
        size = capture.bulk(state)
        on_cuda = self._device.type == "cuda"
        if len(self._copy) < size:
            self._copy = torch.empty(size, dtype=torch.uint8, pin_memory=on_cuda)
        packed = capture.pack(state, meta, into=self._copy)
        if on_cuda:
            torch.cuda.synchronize()
        self.begun_at = time.monotonic()
        self._thread = threading.Thread(target=self._write, args=(packed, place), name="samestep-commit")
        self._thread.start()

    def _write(self, packed: Any, place: list[Any]) -> None:
        begun = time.monotonic()
        try:
            self._directory.commit(packed, place[0])
        except Exception as error:
            # also an error that nobody foresaw: a failed commit must not pass for one that was written
            if not self.failure:
                print(f"samestep: {error}; training goes on and tries again", file=sys.stderr)
            self.failure = str(error) or type(error).__name__
        else:
            self.failure, self.committed = "", place
            self._on_written(time.monotonic() - begun)
