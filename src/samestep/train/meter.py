"""Measures where the time of each training step goes, and writes it to memory that other processes read.

Covered: loops over `loader` and `steps`, on CPU and on CUDA, where it records events instead of synchronising. Not
covered: loops over anything else, and copies to other devices.
"""

import math
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from samestep.rendezvous.member import say
from samestep.rundir import step_times_of
from samestep.steptimes import PARTS, StepTimes, breakdown, read_step_times
from samestep.text import name_ranks
from samestep.train.group.device import number_on_host, overlaps
from samestep.train.group.group import Group, Member
from samestep.train.passes import Pass, Share
from samestep.train.profile import Profile
from samestep.train.step import Spine
from samestep.train.subscriber import Subscriber

_MEASURED = {*PARTS, "user"}
_EXCHANGE_EVERY = 32
_FIRST_LINE_S = 60.0
_LONGEST_PAUSE_S = 600.0
_SHORT_S = 5.0
_MUCH = 0.2  # of a step
_Facts = tuple[int, int, int]  # number of the step, samples of this rank, samples of all
_Marks = list[tuple[Any, str]]
_Done = Callable[[float, float, Sequence[float], _Facts], None]


class Meter(Member, Subscriber):
    """Writes the pulse of this process and the times of its training steps."""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self._spine = group.the(Spine)
        self.counted: int | None = None  # the steps that Checkpoint.step counts, where the script calls it
        self._evaluates = False
        self.times: StepTimes | None = None
        clock = _DeviceClock if overlaps(group.world.device) else _Clock
        self._clock = clock(self._note, self._note_loss)
        self._say_at, self._pause_s = self._clock.since + _FIRST_LINE_S, _FIRST_LINE_S
        self._lost = 0, ""  # the step of this rank's first loss that is not finite, and that loss
        group.watch(self._lost_by_all, self._say_lost)
        self.planned = self._spare_workers = self._mine = self._all = 0
        self._open: set[Pass] = set()
        self._asked = os.environ.get("SAMESTEP_METER", "")
        group.leaving.before_ctrl_c = self.close
        self._most = int(os.environ.get("SAMESTEP_MEASURE_STEPS", 0))
        if os.environ.get("SAMESTEP_PROFILE"):
            group.the(Profile)

    def pass_begins(self, begun: Pass) -> None:
        self._evaluates = not begun.training
        if not begun.training:
            return
        if self.times is None:
            self.times = StepTimes(step_times_of(os.environ, self.group.world.rank))
        now = self.times.progress
        if not self._open:
            self._mine = self._all = 0  # of a step that a `break` has left
        self._open.add(begun)
        now.epoch, now.epochs, now.batches, now.end = begun.epoch, self.planned, begun.batches, 0
        if self.planned and begun.batches:
            now.end = now.rows + begun.batches + (self.planned - begun.epoch - 1) * len(begun.of)
        self._spare_workers = begun.of.spare_workers
        self._clock.begin()

    def pass_ends(self, ended: Pass) -> None:
        self._evaluates = False

    def pass_left(self, left: Pass) -> None:
        self._open.discard(left)

    def step_begins(self, share: Share) -> None:
        if share.of.training:
            self.group.beat((share.step if self.counted is None else self.counted) + 1, share.of.epoch)
            self._mine += share.mine
            self._all += share.all

    def phase_begins(self, phase: str, call: str) -> None:
        self._clock.mark("evaluation" if self._evaluates else phase if phase in _MEASURED else "rest")

    def step_ends(self, share: Share) -> None:
        """End the step, with the batches that loaders in a zip() gave; only the first of them ends it."""
        if not share.of.training or (len(self._open) > 1 and not self._clock.has("backward")):
            return
        assert self.times is not None
        now = self.times.progress
        now.pieces = max(now.pieces, *(share.of.microbatches or (share.all,)))
        self._clock.end((share.step, self._mine, self._all))
        self._mine = self._all = 0
        if self._most and share.step + 1 >= self._most:
            raise SystemExit(0)  # every rank has come to the end of this step

    def backward_begins(self, loss: torch.Tensor) -> None:
        """Read the loss, on a device when it has passed there, for the line of progress and to find nan and inf."""
        if self.times is None or loss.numel() != 1 or loss.is_complex():
            return
        share = self._spine.origins.trained
        is_counted = share is not None and not share.lent
        self._clock.read(loss.detach(), (self.group.step or 0) if is_counted else 0)

    def _note_loss(self, value: float, step: int) -> None:
        if self.times is not None:
            self.times.progress.loss = value
        if step and not self._lost[0] and not math.isfinite(value):
            self._lost = step, str(value)

    def _lost_by_all(self) -> tuple[int, str]:
        """The first loss that is not finite, once every rank has read its own loss of that step."""
        step, _ = self._lost
        return self._lost if step and (self.group.step or 0) - step >= self._clock.late_by else (0, "")

    def _say_lost(self, marks: list[Any], call: str) -> None:
        """Print which ranks had the first losses that are not finite; the others' losses may follow from these."""
        step, value = self._lost = min((step, value) for step, value in marks if step)
        if len(ranks := [rank for rank, (lost, _) in enumerate(marks) if lost == step]) < len(marks):
            self.group.say(
                f"the loss of {name_ranks(ranks)} is {value} in step {step}, and the other ranks' losses are finite "
                "there: the reason is in the samples of that share, or its mean is over no term; then divide the sum "
                "of the terms by samestep.sum of their number",
                what="lost",
            )

    def _note(self, began: float, ended: float, parts: Sequence[float], facts: _Facts) -> None:
        """Write the times of a step, and now and then the line of progress."""
        assert self.times is not None
        number, mine, batch = facts
        progress = self.times.progress
        progress.step = self.group.step or 0
        if progress.rows % _EXCHANGE_EVERY == 0:
            for seen_s, hidden_s in self._spine.models.exchanges():
                progress.exchanged_s += seen_s
                progress.hidden_s += hidden_s
        self.times.add(number, began, ended, mine, batch, parts)
        if ended > self._say_at and self.group.world.rank == 0 and self._asked not in ("0", "live"):
            say(str(progress))
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
            self._say_at = ended + self._pause_s

    def close(self) -> None:
        times, self.times = self.times, None
        if self.group.world.rank == 0 and times is not None and self._asked != "0":
            self._say_breakdown(times)

    def _say_breakdown(self, times: StepTimes) -> None:
        """Print where the time of the steps went, at the end of a run that was not short."""
        now = times.progress
        if self._asked != "1" and now.last - now.first < _SHORT_S:
            return
        paths = {rank: step_times_of(os.environ, rank) for rank in range(self.group.world.size)}
        by_rank = {rank: read_step_times(path) for rank, path in paths.items() if path is not None}
        # without a shared run directory only this rank's times are known
        readings = {rank: reading for rank, reading in by_rank.items() if reading is not None} | {
            0: times.read()
        }
        if said := breakdown(readings):
            say(str(said))
            if self._spare_workers and said.parts["data"] > _MUCH * said.step_s:
                more = f'loader(..., num_workers="auto") would have {self._spare_workers} on this rank'
                say(f"the loop waits for data, and the loader has no workers; {more}")


class _Clock:
    """Marks where each part of a step begins, and reports the times of all parts at the end of the step."""

    late_by = 0  # steps, at most, until a loss has been read

    def __init__(self, done: _Done, note_loss: Callable[[float, int], None]) -> None:
        self._done, self._note_loss = done, note_loss
        self._marks: _Marks = []
        self.since = time.monotonic()

    def begin(self) -> None:
        self._marks = []
        self._set("data")

    def mark(self, part: str) -> None:
        if not self._marks or part != self._marks[-1][1]:
            self._set(part)

    def has(self, part: str) -> bool:
        return any(mark[1] == part for mark in self._marks)

    def end(self, facts: _Facts) -> None:
        self._set("data")
        marks, self._marks = self._marks, self._marks[-1:]
        self._finish(marks, facts)

    def read(self, loss: torch.Tensor, step: int) -> None:
        self._note_loss(float(loss.item()), step)

    def _set(self, part: str) -> None:
        self.since = time.monotonic()
        self._marks.append((self.since, part))

    def _finish(self, marks: _Marks, facts: _Facts) -> None:
        times = dict.fromkeys(PARTS, 0.0)
        for (at, part), (after, follows) in pairwise(marks):
            if part == "user":  # the script's own code
                part = "forward" if follows in ("forward", "backward") else "rest"
            times[part] += self._seconds(at, after)
        began, parts = self._moment(marks[0][0]), list(times.values())
        self._done(began, began + sum(parts), parts, facts)

    def _seconds(self, begin: Any, end: Any) -> float:
        return float(end - begin)

    def _moment(self, mark: Any) -> float:
        return float(mark)


class _DeviceClock(_Clock):
    """A clock that records a device event at each mark, and reads it when the device has passed it."""

    # A loss is copied to the host without waiting, and read when the device has passed the end of its step.

    late_by = 128  # a device's queue has room for fewer steps

    def __init__(self, done: _Done, note_loss: Callable[[float, int], None]) -> None:
        super().__init__(done, note_loss)
        self._losses: list[tuple[torch.Tensor, int]] = []  # of the step that runs now
        self._free: dict[torch.dtype, list[torch.Tensor]] = {}
        self._waiting: deque[tuple[_Marks, _Facts, list[tuple[torch.Tensor, int]]]] = deque()
        self._spare: list[Any] = []
        self._origin: tuple[float, Any] | None = None

    def _set(self, part: str) -> None:
        event = self._spare.pop() if self._spare else torch.Event(enable_timing=True)
        event.record()
        self.since = time.monotonic()
        self._origin = self._origin or (self.since, event)
        self._marks.append((event, part))

    def read(self, loss: torch.Tensor, step: int) -> None:
        if loss.device.type == "cpu":
            return super().read(loss, step)
        free = self._free.setdefault(loss.dtype, [])
        host = free.pop() if free else number_on_host(loss)
        self._losses.append((host.copy_(loss.reshape(()), non_blocking=True), step))

    def _finish(self, marks: _Marks, facts: _Facts) -> None:
        self._waiting.append((marks, facts, self._losses))
        self._losses = []
        while self._waiting and self._waiting[0][0][-1][0].query():
            marks, facts, losses = self._waiting.popleft()
            for host, step in losses:
                self._note_loss(float(host), step)
                self._free[host.dtype].append(host)
            super()._finish(marks, facts)
            assert self._origin is not None
            self._spare += [event for event, _ in marks[:-1] if event is not self._origin[1]]

    def _seconds(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end) / 1e3)

    def _moment(self, mark: Any) -> float:
        assert self._origin is not None
        return self._origin[0] + self._seconds(self._origin[1], mark)
