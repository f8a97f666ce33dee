"""A process that imports torch and waits for orders: it forks ranks, or becomes a rank itself; run as a file.

Orders arrive on a socket, its standard input. A rank behaves as `python script.py` or `python -m module` would, except
that torch is imported before the script's first line.
"""

import sys

# The script's folder comes first in the search path, as it does when the script itself imports torch.
if not sys.flags.safe_path:
    sys.path[:1] = sys.argv[1:]

import atexit
import builtins
import ctypes
import gc
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import time
import warnings
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from types import ModuleType, TracebackType
from typing import Any

# Modules that scripts import, and modules that torch would only import with the first optimizer or DDP.
_LOADED = (
    "torch",
    "torch.optim",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.utils.data",
    "torch._dynamo",
)
_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
_MOST_DESCRIPTORS = 16
_ADOPTED_S = 1.0  # for the kernel to make the launcher the parent


def main() -> None:
    """Wait for orders until this process becomes a rank, or the launcher has ended."""
    orders = socket.socket(fileno=os.dup(0))
    libc = ctypes.CDLL(None)
    if sys.platform == "linux":
        libc.prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    kept: dict[str, ModuleType] = {}
    atexit.register(_leave_whole, kept)  # registered before torch's own functions, and so called after them
    _load()
    kept |= {name: sys.modules[name] for name in sys.modules.keys() - sys.stdlib_module_names - {"__main__"}}
    orders.sendall(b"forks" if _is_forkable() else b"spare")
    while (received := _received(orders)) is not None:
        order, descriptors = received
        if order["fork"] and _has_forked():
            for descriptor in descriptors:
                os.close(descriptor)
            continue
        _become(order, descriptors, orders, libc)
        _run(order["command"])
        return


def _load() -> None:
    gc.disable()  # imports create no garbage, and collecting would take a third of the time
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in _LOADED:
            importlib.import_module(name)
        # the environment of the scripts may have no samestep
        with suppress(ImportError):
            samestep = importlib.import_module("samestep")
            for name in samestep.__all__:
                getattr(samestep, name)
    # a rank's collector must not visit these objects either: it would copy every page of them
    gc.freeze()
    gc.enable()


def _leave_whole(modules: dict[str, ModuleType]) -> None:
    """Keep modules alive at exit: Python would destroy them, which copies every page of them in every rank."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(modules))
    for name in modules:
        sys.modules.pop(name, None)


def _is_forkable() -> bool:
    """Whether this process has a single thread after a fork; a BLAS library ends its threads before a fork."""
    if sys.platform != "linux":
        return False
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    torch = sys.modules["torch"]
    return len(os.listdir("/proc/self/task")) == 1 and not torch.cuda.is_initialized()


def _received(orders: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next order and its descriptors; None if the launcher has ended."""
    sent, descriptors, *_ = socket.recv_fds(orders, 1, _MOST_DESCRIPTORS)
    if not sent:
        return None
    with open(descriptors[0], "rb") as file:
        return json.load(file), descriptors[1:]


def _has_forked() -> bool:
    """Fork twice, so that the new process becomes the launcher's child; False in that process."""
    if between := os.fork():
        os.waitpid(between, 0)
        return True
    if os.fork():
        os._exit(0)
    return False


def _become(order: dict[str, Any], descriptors: list[int], orders: socket.socket, libc: ctypes.CDLL) -> None:
    """Take over session, parent, descriptors, cores and environment, as a new process of the launcher has them."""
    if os.getsid(0) != os.getpid():
        os.setsid()
    until = time.monotonic() + _ADOPTED_S
    while os.getppid() != order["launcher"] and time.monotonic() < until:
        time.sleep(0.0002)
    if sys.platform == "linux":
        libc.prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    reader = select.poll()
    reader.register(descriptors[1], 0)  # the launcher closes this pipe if it gave this rank up
    if os.getppid() != order["launcher"] or reader.poll(0):
        os._exit(1)
    orders.sendall(b"%d" % os.getpid())
    orders.close()
    for number, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, number)
        os.close(descriptor)
    if order["cores"]:
        os.sched_setaffinity(0, order["cores"])
    if hasattr(libc, "on_exit"):
        # called in reverse order: flush, then exit at once, without C++ destructors of what the fork shares
        libc.on_exit(libc._exit, None)
        libc.on_exit(libc.fcloseall, None)
    named = {name: str(number) for name, number in zip(order["named"], descriptors[3:], strict=True)}
    os.environ.clear()
    os.environ.update(order["env"] | named)
    random.seed()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(None)
    sys.modules["torch"].default_generator.seed()
    if process := sys.modules.get("multiprocessing.process"):
        process.current_process().authkey = os.urandom(32)


def _run(command: list[str]) -> None:
    """Run the script of this command line, and end as Python would end."""
    sys.orig_argv, sys.argv = command, command[1:]
    module = sys.modules["__main__"] = ModuleType("__main__")
    vars(module).update(__builtins__=builtins, __annotations__={})
    try:
        if sys.argv[0] == "-m":
            runpy._run_module_as_main(sys.argv.pop(1))  # type: ignore[attr-defined]
        elif sys.argv[0] == "-c":
            exec(compile(sys.argv.pop(1), "<string>", "exec", dont_inherit=True), vars(module))
        else:
            path = os.path.abspath(sys.argv[0])
            vars(module).update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
            with open(path, "rb") as file:
                source = file.read()
            exec(compile(source, path, "exec", dont_inherit=True), vars(module))
    except SystemExit:
        raise
    except BaseException as error:
        ended = error
    else:
        return
    trace, sys.last_value = _without_own_frames(ended), ended  # as Python does
    try:
        sys.excepthook(type(ended), ended, trace)
    except Exception:  # for example after the script closed stderr
        sys.__excepthook__(type(ended), ended, trace)
    if isinstance(ended, KeyboardInterrupt):
        sys.excepthook = lambda *_: None
        raise ended  # Python ends itself by SIGINT
    sys.exit(1)


def _without_own_frames(error: BaseException) -> TracebackType | None:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    error.__traceback__ = trace
    return trace


if __name__ == "__main__":
    main()
