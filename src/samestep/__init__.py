"""samestep makes a serial PyTorch script data-parallel and takes the same step on any number of processes."""

TYPE_CHECKING = False  # typing's own is not used: importing typing takes longer than all the rest here

if TYPE_CHECKING:
    from samestep.errors import CheckpointError as CheckpointError
    from samestep.errors import PlacementError as PlacementError
    from samestep.errors import RankMissing as RankMissing
    from samestep.errors import RanksDiffer as RanksDiffer
    from samestep.errors import SamestepError as SamestepError
    from samestep.errors import UsageError as UsageError
    from samestep.errors import WorkerFailed as WorkerFailed
    from samestep.launch.spawn import launch as launch
    from samestep.train.checkpoint import Checkpoint as Checkpoint
    from samestep.train.loader import loader as loader
    from samestep.train.reduce import gather as gather
    from samestep.train.reduce import mean as mean
    from samestep.train.reduce import sum as sum
    from samestep.train.replicate import no_sync as no_sync
    from samestep.train.replicate import replicate as replicate
    from samestep.train.save import load as load
    from samestep.train.save import save as save
    from samestep.train.steps import steps as steps
    from samestep.train.world import World as World
    from samestep.train.world import first as first
    from samestep.train.world import init as init

__version__ = "0.1.0"
_HOMES = {
    "init": "train.world",
    "World": "train.world",
    "first": "train.world",
    "replicate": "train.replicate",
    "no_sync": "train.replicate",
    "loader": "train.loader",
    "steps": "train.steps",
    "sum": "train.reduce",
    "mean": "train.reduce",
    "gather": "train.reduce",
    "Checkpoint": "train.checkpoint",
    "save": "train.save",
    "load": "train.save",
    "launch": "launch.spawn",
    "SamestepError": "errors",
    "UsageError": "errors",
    "PlacementError": "errors",
    "RanksDiffer": "errors",
    "RankMissing": "errors",
    "WorkerFailed": "errors",
    "CheckpointError": "errors",
}
__all__ = list(_HOMES)


if not TYPE_CHECKING:  # a type checker would take any name to be there

    def __getattr__(name):
        if name not in _HOMES:
            raise AttributeError(f"module 'samestep' has no attribute {name!r}")
        value = globals()[name] = getattr(__import__(f"samestep.{_HOMES[name]}", fromlist=[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
