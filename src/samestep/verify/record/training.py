"""All that a recorder knows of samestep's own training: batches, shares, checkpoints."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader

from samestep.state.directory import CheckpointDirectory
from samestep.train.group import world
from samestep.train.step import Pass, Share, Spine


def is_parallel() -> bool:
    """Whether the script has joined a group."""
    return world._group is not None or dist.is_initialized()


def is_ours(loader: DataLoader[Any]) -> bool:
    """Whether samestep.loader made this loader, and so chooses its samples."""
    return type(loader.batch_sampler).__module__.startswith("samestep.")


def is_inside() -> bool:
    """Whether a loop over batches to train on is not over."""
    current = world._group.the(Spine).trained if world._group is not None else None
    return current is not None and current.of.training


def current_share() -> dict[str, Any]:
    """What of the current batch is this rank's; nothing outside of samestep's loaders."""
    spine = world._group.the(Spine) if world._group is not None else None
    current = None if spine is None else spine.trained
    if spine is None or current is None or not current.all or current.of.of is None:
        return {}
    sampler = current.of.of.sampler
    adds = spine.models.adds_losses and not current.lent
    return {
        "mine": current.mine,
        "all": current.all,
        "samples": current.samples.tolist(),
        "epoch": current.of.epoch,
        "sampler": None if sampler is None else type(sampler).__name__,
        "adds": adds,
    }


def watch_batches(given: Callable[[Any, bool], None], left: Callable[[bool], None]) -> None:
    """Have `given` called with each batch before the loop gets it, and `left` after a pass; each with whether it
    is one of training."""
    hand_out, leave_pass = Spine.hand_out, Spine.leave_pass

    def watched(spine: Spine, share: Share, batch: Any = None, *more: Any) -> None:
        hand_out(spine, share, batch, *more)
        if share.microbatch is None:
            given(batch, share.of.training)

    def watched_end(spine: Spine, passed: Pass) -> None:
        leave_pass(spine, passed)
        left(passed.training)

    Spine.hand_out, Spine.leave_pass = watched, watched_end  # type: ignore[assignment,method-assign]


def move_checkpoints(directory: Path) -> None:
    """Keep checkpoints here: every recorded run starts at the beginning and leaves the script's own alone."""
    original = CheckpointDirectory.__init__

    def moved(self: CheckpointDirectory, place: str | os.PathLike[str], *args: Any) -> None:
        original(self, directory / Path(place).name, *args)

    CheckpointDirectory.__init__ = moved  # type: ignore[assignment,method-assign]
