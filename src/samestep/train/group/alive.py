"""Which objects of the script live, those among them that `load_and_freeze` has hidden from Python's collector."""

import atexit
import gc
import importlib
import io
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, TypeVar

import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter

_Kind = TypeVar("_Kind")

_BUFFERED = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
_SEARCHED = (*_BUFFERED, torch.Tensor, torch.nn.Module, torch.optim.Optimizer, _BaseDataLoaderIter)

Hidden = Sequence[weakref.ref[Any]]


@cache
def load_and_freeze() -> Hidden:
    """Import what DDP imports late, and keep all that was imported out of Python's search for garbage.

    Returns what `alive` looks for among the script's objects, which are now hidden from that search too.
    """
    # That search takes a quarter of the time of such an import, and a second at the end of the process.
    is_enabled = gc.isenabled()
    gc.disable()
    # What is frozen is freed by its last reference alone. So the script's garbage goes before, and what its objects in
    # reference cycles have written is flushed at the end.
    gc.collect()
    hidden = [weakref.ref(each) for each in gc.get_objects() if issubclass(type(each), _SEARCHED)]
    atexit.register(_flush, hidden)
    # An exception that the import keeps would keep all frames below it. A thread has no frame of the script.
    thread = threading.Thread(target=importlib.import_module, args=("torch._dynamo",))
    thread.start()
    thread.join()
    gc.freeze()
    if is_enabled:
        gc.enable()
    return hidden


def alive(kind: type[_Kind], hidden: Hidden) -> Iterator[_Kind]:
    """All objects of this kind, among them those that are hidden."""
    objects = (*gc.get_objects(), *(reference() for reference in hidden))
    return (each for each in objects if issubclass(type(each), kind))


def _flush(hidden: Hidden) -> None:
    for file in (reference() for reference in hidden):
        if isinstance(file, _BUFFERED) and not file.closed:
            with suppress(OSError, ValueError):
                file.flush()
