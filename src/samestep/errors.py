"""The errors that samestep raises, as a tree; every message is one sentence that says what to write instead.

SamestepError
├── UsageError            an argument, option or setting cannot be used (also a ValueError)
│   └── PlacementError    the environment contradicts itself about who this process is; .variable
├── RanksDiffer           ranks brought different values to the same call, or are at different calls; .ranks, .call
├── RankMissing           a rank did not reach a collective call, or left before it; .ranks, .call
├── WorkerFailed          a worker ended without an exception (by a signal or an exit code); .rank, .code
└── CheckpointError       a file cannot be read or written, is damaged, or belongs to another run; .path

An attribute that is not known is None, and `ranks` is empty.
"""

import os
from collections.abc import Iterable


class SamestepError(Exception):
    """The base of all errors that samestep raises itself."""


class UsageError(SamestepError, ValueError):
    """An argument, option or setting cannot be used; the message says what to write instead. Also a ValueError."""


class PlacementError(UsageError):
    """The environment contradicts itself about who this process is; `variable` names the variable to correct."""

    def __init__(self, message: str = "", *, variable: str | None = None) -> None:
        super().__init__(message)
        self.variable = variable


class _AboutRanks(SamestepError):
    def __init__(self, message: str = "", *, ranks: Iterable[int] = (), call: str | None = None) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)
        self.call = call


class RanksDiffer(_AboutRanks):
    """Ranks brought different values to `call`, or are at different calls; `ranks` are those that differ."""


class RankMissing(_AboutRanks):
    """A rank did not reach the collective `call`, or left before it; `ranks` are the missing ranks."""


class WorkerFailed(SamestepError):
    """The worker `rank` ended without an exception; `code` is its exit code, or -N for signal N."""

    def __init__(self, message: str = "", *, rank: int | None = None, code: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.code = code


class CheckpointError(SamestepError):
    """A file cannot be read or written, is damaged, or belongs to another run; `path` is the file or directory."""

    def __init__(self, message: str = "", *, path: str | os.PathLike[str] | None = None) -> None:
        super().__init__(message)
        self.path = None if path is None else os.fspath(path)
