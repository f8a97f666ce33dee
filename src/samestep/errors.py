"""What can go wrong, as a tree; every message is one sentence that says what to write instead.

SamestepError
├── UsageError            what you wrote cannot be (also a ValueError)
│   └── PlacementError    the environment contradicts itself about who this process is; .variable
├── RanksDiffer           ranks brought different things to the same call; .ranks, .call
├── RankMissing           a rank did not reach a collective call, or left before it; .ranks, .call
├── WorkerFailed          a worker ended without an exception of its own (a signal, an exit code); .rank, .code
└── CheckpointError       a file is torn, damaged, or belongs to another run; .path

An attribute that is not known is None, and `ranks` is empty.
"""

import os
from collections.abc import Iterable


class SamestepError(Exception):
    """Everything samestep raises by itself."""


class UsageError(SamestepError, ValueError):
    """What you wrote cannot be."""


class PlacementError(UsageError):
    """The environment contradicts itself about who this process is; `variable` names what to correct."""

    def __init__(self, message: str = "", *, variable: str | None = None) -> None:
        super().__init__(message)
        self.variable = variable


class _AboutRanks(SamestepError):
    def __init__(self, message: str = "", *, ranks: Iterable[int] = (), call: str | None = None) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)
        self.call = call


class RanksDiffer(_AboutRanks):
    """Ranks brought different things to the same call; `ranks` are those that differ from the others."""


class RankMissing(_AboutRanks):
    """A rank did not reach a collective call, or left before it; `ranks` are the missing ones."""


class WorkerFailed(SamestepError):
    """A worker ended without an exception of its own; `code` is its exit code, or -N for signal N."""

    def __init__(self, message: str = "", *, rank: int | None = None, code: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.code = code


class CheckpointError(SamestepError):
    """A file is torn, damaged, or belongs to another run; `path` is that file or its directory."""

    def __init__(self, message: str = "", *, path: str | os.PathLike[str] | None = None) -> None:
        super().__init__(message)
        self.path = None if path is None else os.fspath(path)
