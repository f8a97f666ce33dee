"""Calls a function on N processes, from a notebook or a test: returns its values by rank, or raises its exception."""

import codecs
import os
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, ParamSpec, TypeVar

import cloudpickle

from samestep.errors import UsageError, WorkerFailed
from samestep.files import unnamed_file
from samestep.placement.devices import share_cores
from samestep.rendezvous.key import DESCRIPTOR, key_file
from samestep.rendezvous.listen import hold_port
from samestep.start.call import BOOT
from samestep.start.fork import Warm
from samestep.start.memory import check_room, explain_kill, kills_for_memory
from samestep.start.nodes import NodeRanks
from samestep.start.output import OUT
from samestep.start.script import defaults, worker_env
from samestep.start.signals import restore_sigchld
from samestep.start.supervise import WorkerGroup
from samestep.start.worker import Guardian, Worker, WorkerSpec, fill_standard_descriptors
from samestep.text import type_of
from samestep.tracebacks import describe_end, last_words

P = ParamSpec("P")
R = TypeVar("R")


def launch(fn: Callable[P, R], size: int, *args: P.args, **kwargs: P.kwargs) -> list[R]:
    """Local. Call a function on new processes of this machine, each of them a rank: from a notebook or a test.

    fn: the function; cloudpickle sends it, so a lambda or a notebook's function will do.
    size: how many processes.
    *args, **kwargs: what fn is called with.

    Returns what fn returned, a list in the order of ranks. Raises the exception of the first rank that failed, after
    the others were stopped; WorkerFailed if a process ended without an exception.

        def train(lr):
            return samestep.init().rank * lr
        assert samestep.launch(train, 2, lr=0.1) == [0.0, 0.1]
    """
    if not callable(fn):
        raise UsageError(f"launch got {type_of(fn)}, which cannot be called; pass a function")
    if type(size) is not int or size < 1:
        raise UsageError(
            f"launch got size {size!r}, which is not a number of processes; use a whole number of at least 1"
        )
    __tracebackhide__ = True  # pytest and IPython then show the worker's frames without these
    check_room(size)
    with _by_value_where_unimportable(sys.modules.get(getattr(fn, "__module__", None) or "")):
        text = cloudpickle.dumps(sys.path) + cloudpickle.dumps((fn, args, kwargs))
    fill_standard_descriptors()
    restore_sigchld()
    kills = kills_for_memory()
    with ExitStack() as stack:
        held, port = hold_port()
        stack.enter_context(held)
        calls = [stack.enter_context(unnamed_file(text)) for _ in range(size)]
        shares, threads = share_cores(size)
        # No run directory: nothing is kept, but the variable must be set so that workers know samestep started them.
        key = stack.enter_context(key_file(secrets.token_bytes(32), size))
        variables = {"SAMESTEP_RUN": os.devnull, "TORCHELASTIC_RUN_ID": "launch"}
        ranks = NodeRanks(0, size, 0, 1, "127.0.0.1", port)
        guardian = stack.enter_context(Guardian())
        warm = _warm(size, threads, guardian, stack)
        specs = [
            WorkerSpec(
                rank,
                [sys.executable, "-c", BOOT],
                worker_env(ranks.place(rank, size), threads, variables),
                shares[rank],
                call.fileno(),
                console=_Caller() if rank == 0 else None,
                descriptors={DESCRIPTOR: key},
                is_alone=False,
            )
            for rank, call in enumerate(calls)
        ]
        group = WorkerGroup(specs, guardian, warm=warm)
        outcome = group.watch()
        for call in calls:
            call.seek(0)
        answers = [call.read() for call in calls]
        if outcome.cause is not None:
            _raise(outcome.cause, answers[outcome.cause.rank], size, explain_kill(kills))
        for rank in (rank for rank, answer in enumerate(answers) if not answer):
            why = "left with exit code 0 before it returned; return instead of sys.exit"
            raise WorkerFailed(f"rank {rank} {why}", rank=rank, code=0)
        return [cloudpickle.loads(answer) for answer in answers]


def _warm(size: int, threads: int, guardian: Guardian, stack: ExitStack) -> Warm | None:
    """A warm process to fork the ranks from, if the function may need torch: torch is then imported only once."""
    if size == 1 or "torch" not in sys.modules:
        return None
    path = [os.path.abspath(place) for place in sys.path]
    env = {**defaults(threads), **os.environ}
    warm = stack.enter_context(closing(Warm(path, env, size, Path(os.devnull), guardian)))
    warm.wait()
    return warm


class _Caller:
    """The caller's sys.stdout and sys.stderr, which have no descriptors in a notebook."""

    crowded = False

    def __init__(self) -> None:
        self._decoders = [codecs.getincrementaldecoder("utf-8")(errors="replace") for _ in range(2)]

    def show(self, kind: int, data: bytes, owner: object, prefix: bytes = b"") -> None:
        stream = sys.stdout if kind == OUT else sys.stderr
        stream.write(self._decoders[kind - OUT].decode(data))
        stream.flush()


def _raise(cause: Worker, answer: bytes, size: int, killed: str) -> NoReturn:
    __tracebackhide__ = True
    status, facts = cause.status or 0, {"rank": cause.rank, "code": cause.status or 0}
    who = f"rank {cause.rank} of {size}"
    if status != 1 or not answer:
        end = killed if status == -9 else describe_end(status)
        output = "".join(f"\n{line}" for line in last_words(cause.err.tail.decode(errors="replace")))
        raise WorkerFailed(f"{who} ended without an answer: {end}{output}", **facts)
    try:
        error, text = cloudpickle.loads(answer)
    except Exception as unreadable:
        raise WorkerFailed(f"{who} failed, and its exception is not readable here", **facts) from unreadable
    if error is None:
        raise WorkerFailed(f"{who} failed:\n{text}", **facts)
    error.add_note(f"on {who}:\n{text}")
    raise error


@contextmanager
def _by_value_where_unimportable(module: ModuleType | None) -> Iterator[None]:
    """While entered, a module that a worker cannot import (a test's, a notebook cell's) is pickled by value."""
    if module is None or module.__name__ == "__main__" or _is_importable(module):
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _is_importable(module: ModuleType) -> bool:
    path: Any = None
    spec = None
    parts = module.__name__.split(".")
    for depth in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:depth]), path)
        if spec is None:
            return False
        path = spec.submodule_search_locations
    return spec is not None and spec.origin == getattr(module, "__file__", spec.origin)
