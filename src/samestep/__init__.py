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
    from samestep.start.spawn import launch as launch
    from samestep.train.checkpoint.checkpoint import Checkpoint as Checkpoint
    from samestep.train.checkpoint.save import load as load
    from samestep.train.checkpoint.save import save as save
    from samestep.train.data.loader import loader as loader
    from samestep.train.data.steps import steps as steps
    from samestep.train.group.world import World as World
    from samestep.train.group.world import first as first
    from samestep.train.group.world import init as init
    from samestep.train.model.replicate import no_sync as no_sync
    from samestep.train.model.replicate import replicate as replicate
    from samestep.train.totals import gather as gather
    from samestep.train.totals import mean as mean
    from samestep.train.totals import sum as sum

__version__ = "0.1.0"
_HOMES = {
    "init": "train.group.world",
    "World": "train.group.world",
    "first": "train.group.world",
    "replicate": "train.model.replicate",
    "no_sync": "train.model.replicate",
    "loader": "train.data.loader",
    "steps": "train.data.steps",
    "sum": "train.totals",
    "mean": "train.totals",
    "gather": "train.totals",
    "Checkpoint": "train.checkpoint.checkpoint",
    "save": "train.checkpoint.save",
    "load": "train.checkpoint.save",
    "launch": "start.spawn",
    "SamestepError": "errors",
    "UsageError": "errors",
    "PlacementError": "errors",
    "RanksDiffer": "errors",
    "RankMissing": "errors",
    "WorkerFailed": "errors",
    "CheckpointError": "errors",
}
__all__ = list(_HOMES)
# What other libraries call it.
_ELSEWHERE = {
    "prepare": "write samestep.replicate(model) and samestep.loader(dataset, batch_size=...)",
    "backward": "write loss.backward()",
    "rank": "write samestep.init().rank",
    "size": "write samestep.init().size",
    "world_size": "write samestep.init().size",
    "device": "write samestep.init().device",
    "barrier": "samestep's calls wait where it is needed; torch.distributed.barrier() waits elsewhere",
    "all_reduce": "write samestep.sum(value) or samestep.mean(value)",
    "all_gather": "write samestep.gather(value)",
    "reduce": "write samestep.sum(value) or samestep.mean(value)",
    "DataLoader": "write samestep.loader(dataset, batch_size=...)",
    "DistributedDataParallel": "write samestep.replicate(model)",
}


if not TYPE_CHECKING:  # a type checker would take any name to be there

    def __getattr__(name):
        if name not in _HOMES:
            remedy = f"; {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
            raise AttributeError(f"module 'samestep' has no attribute {name!r}{remedy}")
        value = globals()[name] = getattr(__import__(f"samestep.{_HOMES[name]}", fromlist=[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
