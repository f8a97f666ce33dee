"""Records chosen steps of this rank with torch's profiler, and the run's phases in these steps."""

import json
import os
import time
from pathlib import Path

import torch

from samestep.train.group.group import Group, Member
from samestep.train.passes import Share
from samestep.train.step import Spine
from samestep.train.subscriber import Subscriber


class Profile(Member, Subscriber):
    """For `samestep profile`, which joins the ranks' files: $SAMESTEP_PROFILE is `first:last:ranks:directory`."""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        first, last, ranks, directory = os.environ["SAMESTEP_PROFILE"].split(":", 3)
        self._first, self._last = int(first), int(last)
        rank = group.world.rank
        self._path = Path(directory, f"rank-{rank}")
        self._profiler: torch.profiler.profile | None = None
        self._phases: list[tuple[str, float]] = []
        if not ranks or str(rank) in ranks.split(","):
            group.the(Spine).subscribe(self)

    def step_begins(self, share: Share) -> None:
        if not share.of.training:
            return
        if share.step == self._first:
            self._profiler = torch.profiler.profile(record_shapes=True)
            self._profiler.start()
        if self._profiler is not None:
            self._phases.append((f"step {share.step}", time.time_ns() / 1e3))

    def phase_begins(self, phase: str, call: str) -> None:
        if self._profiler is not None:
            self._phases.append((phase if phase == "exchange" else call or phase, time.time_ns() / 1e3))

    def step_ends(self, share: Share) -> None:
        if self._profiler is not None and share.of.training and share.step >= self._last:
            profiler, self._profiler = self._profiler, None
            self._phases.append(("end", time.time_ns() / 1e3))
            profiler.stop()
            profiler.export_chrome_trace(f"{self._path}.trace.json")
            Path(f"{self._path}.phases.json").write_text(json.dumps(self._phases))
