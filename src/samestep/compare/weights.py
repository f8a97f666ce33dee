"""Reads the state in a weights file without running code from it."""

import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from samestep.compare.names import flatten
from samestep.errors import CheckpointError
from samestep.files import open_directory
from samestep.state import file as carry
from samestep.state.directory import examine
from samestep.state.tree import Blob
from samestep.text import printable

_EXPANSION = 64  # how much larger than its file a tensor may be
_SMALL = 1 << 24


@dataclass(frozen=True)
class Weights:
    """The state of a weights file; for a directory, `file` is the file that was read."""

    file: Path
    state: object
    notes: tuple[str, ...] = ()


def read(path: str | Path) -> Weights:
    """The state in a samestep checkpoint, a directory of them, or a file of `torch.save` or safetensors."""
    path = Path(path)
    try:
        if not path.exists():
            raise CheckpointError(f"{path} does not exist")
        if path.is_dir():
            return _newest(path)
        if not path.is_file():
            raise CheckpointError(f"{path} is not a file; name a weights file")
        state = _load(path)
        flat, _ = flatten(state)
    except CheckpointError:
        raise
    except RecursionError:
        raise CheckpointError(f"{path} is nested too deeply to be a state") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror or printable(error)})") from None
    except Exception as error:
        raise CheckpointError(f"{path} {_why(error)}") from None
    _check(path, flat)
    return Weights(path, state)


def _newest(directory: Path) -> Weights:
    bad = []
    with open_directory(directory) as dir_fd:
        commits = examine(dir_fd)
    for commit in commits:
        try:
            if commit.why:
                raise CheckpointError(f"{directory}: {commit.why}")
            weights = read(directory / commit.entry.name)
        except CheckpointError as error:
            bad.append(f"{error}; reading an older checkpoint")
        else:
            note = f"{directory}: reading its newest good checkpoint, {commit.entry.name}"
            return replace(weights, notes=(*bad, note))
    raise CheckpointError(f"{directory} holds no good checkpoint; name a weights file")


def _load(path: Path) -> object:
    with path.open("rb") as file:
        head = file.read(16)
    if not head:
        raise CheckpointError(f"{path} is empty")
    # Check sparse indices: wrong indices could read outside of their tensor. Old pickles warn, but can be loaded.
    with warnings.catch_warnings(), torch.sparse.check_sparse_tensor_invariants():  # type: ignore[no-untyped-call]
        warnings.simplefilter("ignore")
        if head.startswith(b"samestep"):
            return carry.read(path.resolve(), _room)[0]
        if head[8:9] == b"{":
            return load_file(path)
        if head.startswith((b"PK\3\4", b"\x80")):
            return torch.load(path, map_location="cpu", mmap=head.startswith(b"PK"), weights_only=True)
    raise CheckpointError(
        f"{path} is not a weights file (it begins with {head[:8]!r}); name one of torch.save or safetensors"
    )


def _check(path: Path, flat: Mapping[str, object]) -> None:
    """Refuse a tensor that claims far more data than its file has: an expanded tensor may claim any size."""
    if not flat:
        raise CheckpointError(f"{path} holds no tensor and no value")
    for name, tensor in flat.items():
        if not isinstance(tensor, Tensor):
            continue
        if tensor.is_nested:
            raise CheckpointError(
                f"{path} holds {name} as a nested tensor, which has no shape; save its parts"
            )
        if tensor.is_meta:
            raise CheckpointError(f"{path} holds {name} without its data; save it from a real device")
        claimed = tensor.numel() * tensor.element_size()
        if claimed > max(_SMALL, _EXPANSION * path.stat().st_size):
            raise CheckpointError(
                f"{path} claims {claimed:.1e} bytes for {name}, far more than the file holds"
            )


def _room(blob: Blob) -> tuple[memoryview, Callable[[], object]]:
    tensor = torch.empty(blob.shape, dtype=getattr(torch, blob.dtype))
    return tensor.reshape(-1).view(torch.uint8).numpy().data, lambda: tensor


def _why(error: Exception) -> str:
    text = str(error)
    if pickled := re.search(r"GLOBAL (\S+)", text):
        return (
            f"holds a pickled {printable(pickled[1])}, and reading that could run code from the file; "
            "save the model's state_dict() instead"
        )
    if "TorchScript" in text:
        return "is a TorchScript archive; save the model's state_dict() instead"
    is_cut = re.search("central directory|EOF|not fully covered|invalid header", text)
    if is_cut or isinstance(error, EOFError):
        return "is torn: its end is missing"
    if "WeightsUnpickler" in text or "Invalid magic number" in text:
        return "is a pickle, but not one of torch.save; name a file of torch.save or safetensors"
    first_line = printable(text.strip().partition("\n")[0])
    return f"cannot be read as weights ({type(error).__name__}: {first_line})"
