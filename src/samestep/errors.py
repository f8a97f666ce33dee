"""What can go wrong, as a tree; every message is one sentence that says what to write instead.

SamestepError
├── UsageError            what you wrote cannot be (also a ValueError)
│   └── PlacementError    the environment contradicts itself about who this process is
├── RanksDiffer           ranks brought different things to the same call
├── RankMissing           a rank did not reach a collective call, or left before it
├── WorkerFailed          a worker ended without an exception of its own (a signal, an exit code)
└── CheckpointError       a file is torn, damaged, or belongs to another run
"""


class SamestepError(Exception):
    """Everything samestep raises by itself."""


class UsageError(SamestepError, ValueError):
    """What you wrote cannot be."""


class PlacementError(UsageError):
    """The environment contradicts itself about who this process is."""


class RanksDiffer(SamestepError):
    """Ranks brought different things to the same call."""


class RankMissing(SamestepError):
    """A rank did not reach a collective call, or left before it."""


class WorkerFailed(SamestepError):
    """A worker ended without an exception of its own."""


class CheckpointError(SamestepError):
    """A file is torn, damaged, or belongs to another run."""
