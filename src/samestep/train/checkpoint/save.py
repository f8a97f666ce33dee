"""Who writes the file: one rank, whole or not at all, in a form the serial world reads."""

import os
import re
import sys
from pathlib import Path
from typing import Any

import torch

from samestep.errors import CheckpointError
from samestep.files import write_atomically
from samestep.train.group.world import joined


def save(path: str | os.PathLike[str], state: Any) -> None:
    """Collective. Rank 0's state in one file for `torch.load`; it is there on every rank's return."""
    failure = ""
    if joined().world.rank == 0:
        try:
            write_atomically(Path(os.path.realpath(path)), lambda file: torch.save(state, file))
        except Exception as error:  # whatever it is, the others wait to hear of it
            reason = (getattr(error, "strerror", None) or str(error)).partition("\n")[0].lower()
            failure = f"{path} cannot be written ({reason}); what was there is intact"
    if failure := joined().all_gather("samestep.save", failure.encode())[0].decode():
        raise CheckpointError(failure)
    if joined().world.rank == 0:
        _remark_others(path)


def _remark_others(path: str | os.PathLike[str]) -> None:
    """What load refuses is no reason to lose a training's result, but to be told of while it is at hand."""
    if others := torch.serialization.get_unsafe_globals_in_checkpoint(path):
        print(
            f"samestep: {path} holds {', '.join(sorted(others)[:3])}, which torch.load(weights_only=True) does not "
            "read; save a state_dict, numbers as float(x) and arrays as tensors",
            file=sys.stderr,
        )


def load(path: str | os.PathLike[str]) -> Any:
    """Local. What save or torch.save wrote, on CPU; never runs code, drops `module.` before every key."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is not there; save it first, or name another file") from error
    except Exception as error:  # a damaged pickle raises what its bytes happen to spell
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if other := re.search(r"GLOBAL ([\w.]+)", str(error)):
            reason = f"it holds a {other[1]}"
        raise CheckpointError(
            f"{path} is no file of plain weights ({reason}); save a state_dict instead, and numbers as float(x)"
        ) from error
    if (
        isinstance(state, dict)
        and state
        and all(isinstance(key, str) and key.startswith("module.") for key in state)
    ):
        return {key.removeprefix("module."): value for key, value in state.items()}
    return state
