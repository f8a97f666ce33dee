"""`save` and `load`: rank 0 writes a file atomically, in a form that `torch.load` reads."""

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from samestep.errors import CheckpointError, UsageError
from samestep.files import write_atomically
from samestep.state.leftovers import remove_unfinished_beside
from samestep.text import type_of
from samestep.train.group.control import users_line
from samestep.train.group.world import joined


def save(path: str | os.PathLike[str], state: Any) -> None:
    """Collective. Write rank 0's state to a file, as `torch.save` does; returns on every rank when it is there.

    path: the file, in a directory that exists. An old file stays as it is until the new one is complete.
    state: what torch.save takes, best a state_dict. What the other ranks pass is not used.
    A rank whose path is in another directory, as in a temporary one of its own, gets a copy there.

    Raises CheckpointError on every rank if the file cannot be written.

        samestep.save("model.pt", model.state_dict())
    """
    if not isinstance(path, str | os.PathLike):
        raise UsageError(
            f"save got {type_of(path)} as its path; the path comes first: samestep.save('model.pt', state)"
        )
    if Path(path).suffix == ".safetensors":
        raise UsageError(
            f"save writes {path} in torch's format, which is not that of safetensors; write "
            "samestep.save('model.pt', state), and safetensors.torch.save_file on rank 0 for the other"
        )
    failure, own = "", os.path.abspath(path)
    if joined().world.rank == 0:
        with joined().within("checkpoint", f"samestep.save ({users_line()})"):
            try:
                target = Path(os.path.realpath(path))
                remove_unfinished_beside(target)
                write_atomically(target, lambda file: torch.save(state, file))
            except Exception as error:  # of any kind: the other ranks wait for the result
                reason = (getattr(error, "strerror", None) or str(error)).partition("\n")[0].lower()
                failure = f"{path} cannot be written ({reason}); what was there is intact"
    answers = joined().all_gather("samestep.save", (failure, own))
    failure, written = answers[0]
    if failure:
        raise CheckpointError(failure)
    if joined().world.rank == 0:
        _remark_others(path)
    if {path for _, path in answers} != {written}:
        directory, name = os.path.split(own)
        with suppress(OSError):  # rank 0's file is on another machine, or this rank may not write
            is_elsewhere = not os.path.samefile(directory, os.path.dirname(written))
            if is_elsewhere and name == os.path.basename(written):
                write_atomically(Path(own), Path(written).read_bytes())
        joined().all_gather("samestep.save", None)  # rank 0 may remove its directory


def _remark_others(path: str | os.PathLike[str]) -> None:
    """Print a remark on objects that `load` will refuse, while the script still has them."""
    if others := torch.serialization.get_unsafe_globals_in_checkpoint(path):
        joined().say(
            f"{path} is written, and holds {', '.join(sorted(others)[:3])}, which torch.load(weights_only=True) does "
            "not read; save a state_dict, numbers as float(x) and arrays as tensors",
            what="objects in a file",
        )


def load(path: str | os.PathLike[str]) -> Any:
    """Local. Read a file that `save` or `torch.save` wrote; tensors come to the CPU, and no code in it is run.

    path: the file. If all keys of it, or of a dict in it, begin with `module.`, as DDP writes them, that prefix is
        removed.

    Returns the state. Raises CheckpointError if the file is not there, is damaged, or holds more than tensors,
    numbers, text and containers of them.

        model.load_state_dict(samestep.load("model.pt"))
    """
    if not isinstance(path, str | os.PathLike):
        raise UsageError(f"load got {type_of(path)} as its path; write samestep.load('model.pt')")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except IsADirectoryError as error:
        raise CheckpointError(
            f"{path} is a directory; name a file that save wrote, or go on from a directory of commits with "
            "samestep.Checkpoint(...).resume()"
        ) from error
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is not there; save it first, or name another file") from error
    except Exception as error:  # a damaged pickle may raise any exception
        reason = str(error).partition("\n")[0]
        if " " not in reason:  # a byte or a key
            reason = "its bytes are none of torch.save"
        if other := re.search(r"GLOBAL ([\w.]+)", str(error)):
            reason = f"it holds a {other[1]}"
        raise CheckpointError(
            f"{path} is not a file of plain weights ({reason}); save a state_dict instead, and numbers as float(x)"
        ) from error
    return without_prefix(state)


def without_prefix(state: Any) -> Any:
    """The state without DDP's prefix, in every dict in which all keys have it."""
    if not isinstance(state, dict) or not state:
        return state
    has_prefix = all(isinstance(key, str) and key.startswith("module.") for key in state)
    return {
        key.removeprefix("module.") if has_prefix else key: without_prefix(value)
        for key, value in state.items()
    }
