"""samestep makes a serial PyTorch script data-parallel and takes the same step on any number of processes."""

TYPE_CHECKING = False  # not from typing: importing typing would take longer than everything else here

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
_NAMES = {
    "train.group.world": ("init", "World", "first"),
    "train.model.replicate": ("replicate", "no_sync"),
    "train.data.loader": ("loader",),
    "train.data.steps": ("steps",),
    "train.totals": ("sum", "mean", "gather"),
    "train.checkpoint.checkpoint": ("Checkpoint",),
    "train.checkpoint.save": ("save", "load"),
    "start.spawn": ("launch",),
    "errors": (
        *("SamestepError", "UsageError", "PlacementError", "CheckpointError", "WorkerFailed"),
        *("RanksDiffer", "RankMissing"),
    ),
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}
__all__ = list(_HOMES)
# Names of other libraries, and what to write here.
_ELSEWHERE = {
    "prepare": "write samestep.replicate(model) and samestep.loader(dataset, batch_size=...)",
    "backward": "write loss.backward()",
    "rank": "write samestep.init().rank",
    "size": "write samestep.init().size",
    "world_size": "write samestep.init().size",
    "world": "write samestep.init()",
    "Accelerator": "write samestep.init()",
    "Fabric": "write samestep.init()",
    "get_rank": "write samestep.init().rank",
    "get_world_size": "write samestep.init().size",
    "init_process_group": "write samestep.init()",
    "destroy_process_group": "samestep closes the group when the script ends; leave it out",
    "device": "write samestep.init().device",
    "is_main": "write samestep.init().rank == 0",
    "is_main_process": "write samestep.init().rank == 0",
    "print": "write print(...): `samestep run` shows rank 0's output alone",
    "barrier": "samestep's calls wait where it is needed; torch.distributed.barrier() waits elsewhere",
    "all_reduce": "write samestep.sum(value) or samestep.mean(value)",
    "all_gather": "write samestep.gather(value)",
    "broadcast": "replicate makes models equal; torch.distributed.broadcast sends other tensors",
    "reduce": "write samestep.sum(value) or samestep.mean(value)",
    "DataLoader": "write samestep.loader(dataset, batch_size=...)",
    "DistributedDataParallel": "write samestep.replicate(model)",
}


if not TYPE_CHECKING:  # for a type checker every name would exist

    def __getattr__(name):
        if name not in _HOMES:
            remedy = f"; {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
            raise AttributeError(f"module 'samestep' has no attribute {name!r}{remedy}")
        value = globals()[name] = getattr(__import__(f"samestep.{_HOMES[name]}", fromlist=[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
