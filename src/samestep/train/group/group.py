"""All ranks of a run as an object, which can be closed and opened again in the same process."""

import faulthandler
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from typing import IO, Any, TypeVar

import torch.distributed as dist

from samestep.errors import SamestepError, UsageError
from samestep.failure import write_failure
from samestep.placement.launchers import count
from samestep.rendezvous.member import say
from samestep.rundir import STACK_SIGNAL, WAITS, Pulse, pulse_of, stack_path
from samestep.text import reason_of
from samestep.train.group.alive import Hidden
from samestep.train.group.census import Item, added, by_rank, item_of, merged, of_kind, value_of
from samestep.train.group.control import LEFT, Join, exchange, place_of
from samestep.train.group.leaving import Leaving
from samestep.train.group.store import TreeStore
from samestep.train.group.tasks import Output
from samestep.train.group.watch import MutualWatch, keep_pulse

T = TypeVar("T", bound="Member")
_PIECE = 1 << 24


class Member:
    """An object that exists once in a group: `group.the(Kind)` makes it at the first call, and the group closes it."""

    def __init__(self, group: "Group") -> None:
        self.group = group

    def close(self) -> None:
        """Release resources; the group is still open."""


class Group:
    """The world, small messages between ranks, and the members."""

    def __init__(
        self,
        world: Any,
        store: TreeStore | None,
        variables: Mapping[str, str | None],
        timeout: timedelta,
        output: Output | None = None,
        pulse: Pulse | None = None,
    ) -> None:
        """`variables`: the environment variables that opening this group has set, with their old values."""
        self.world, self.timeout = world, timeout
        self.pulse = pulse
        if pulse is not None:
            pulse.take(str(world.device))
        self.step: int | None = None
        self.phase, self.phase_began, self.waits = ("user", ""), time.monotonic(), 0
        self.share = (0, 0)  # this rank's samples in the batch at hand, and those of all ranks
        self.hidden: Hidden = ()  # objects of the script that Python's collector does not see
        self.failed_exchange = ""  # the model in whose gradient exchange an exception was raised
        self.thread = threading.current_thread()  # that trains; the main thread may wait for it
        self._phases_heard: list[Callable[[str, str], None]] = []
        # kept here, since torch keeps only the part of the store that is not Python
        self.store: Any = store or dist.HashStore()  # type: ignore[attr-defined]
        self._tree = tree = store.tree if store else None
        self._pid, self._place = os.getpid(), ""
        self.restarts = count(os.environ, "TORCHELASTIC_RESTART_COUNT")
        self._marks: list[tuple[Callable[[], Any], Callable[[list[Any], str], None]]] = []
        self._variables = dict(variables)
        self._members: dict[type[Member], Member] = {}
        self._replaced: list[tuple[Any, str, Any]] = []
        self._said: set[str] = set()
        self._watch = MutualWatch(self, tree) if tree and world.launcher != "samestep" else None
        self.leaving = Leaving(self, self._watch, output)
        self._closed = threading.Event()
        if tree and pulse:
            threading.Thread(target=keep_pulse, args=(pulse, self._closed), daemon=True).start()

    @property
    def is_connected(self) -> bool:
        """Whether this rank is still connected to others."""
        return self._tree is not None

    def the(self, kind: type[T]) -> T:
        """The group's member of this class."""
        member = self._members.get(kind)
        if member is None:
            member = self._members[kind] = kind(self)
        return member  # type: ignore[return-value]

    def all_gather(self, call: str, value: Any = None, *, patience: timedelta | None = None) -> list[Any]:
        """Collective. Every rank's bytes or JSON value, by rank; raises on all ranks if they are at different calls."""
        mine = [item_of(self.world.rank, value)]
        return by_rank(self._exchange(call, mine, merged, patience), self.world.size)

    def broadcast(self, call: str, value: Any) -> Any:
        """Collective. Rank 0's value; the others' are not sent. Raises as `all_gather` does."""
        mine = [] if self.world.rank else [item_of(0, value)]
        return value_of(self._exchange(call, mine, merged)[0])

    def total(
        self, call: str, alike: Any, payload: bytes, add: Callable[[bytes, bytes], bytes]
    ) -> tuple[bytes, list[Any]]:
        """Collective. All payloads added in a fixed tree, and each rank's `alike`; b"" as the total if these differ."""
        rank, size = self.world.rank, self.world.size

        def join(items: Sequence[Item]) -> list[Item]:
            kinds = merged(item for item in items if item.kind != "block")
            blocks = {(item.ranks[0], item.ranks[1]): item.value for item in of_kind("block", items)}
            sums = added(blocks, size, add) if len(kinds) == 1 else {}
            return [*kinds, *(Item("block", at, value) for at, value in sums.items())]

        answer = self._exchange(call, [item_of(rank, alike), Item("block", [0, rank], payload)], join)
        total = b"".join(item.value for item in of_kind("block", answer))
        return total, by_rank((item for item in answer if item.kind != "block"), size)

    def hand_out(self, file: IO[bytes]) -> None:
        """Collective. Copy rank 0's open file to an open file of every other rank."""
        if self._tree is None:
            return
        call, is_source = "samestep's handing out of a file", self.world.rank == 0
        here = os.fstat(file.fileno()).st_size if is_source else 0
        for _ in range(0, self.broadcast(call, here), _PIECE):
            piece = self.broadcast(call, file.read(_PIECE) if is_source else b"")
            if not is_source:
                file.write(piece)

    def watch(self, mark: Callable[[], Any], differ: Callable[[list[Any], str], None]) -> None:
        """Send the JSON value of `mark` with every message; `differ` is called on all ranks if they are not equal."""
        self._marks.append((mark, differ))

    def beat(self, step: int, epoch: int) -> None:
        self.step = step
        if self.pulse is not None:
            self.pulse.beat(step, epoch)

    def enter(self, phase: str, call: str = "") -> None:
        """Note what this rank does from now on: one of rundir's PHASES, and the call with its line."""
        self.phase, self.phase_began, self.leaving.left = (phase, call), time.monotonic(), ""
        self.waits += phase in WAITS
        if phase in ("data", "call"):  # backward may enter others in a thread of torch
            self.thread = threading.current_thread()
            if self.pulse is not None:
                self.pulse.follow(self.thread)
        if self.pulse is not None:
            self.pulse.enter(phase, call)
        for hear in self._phases_heard:
            hear(phase, call)

    @contextmanager
    def within(self, phase: str, call: str = "") -> Iterator[None]:
        """Context manager: this rank is in another phase."""
        before = self.phase
        self.enter(phase, call)
        try:
            yield
        except BaseException:
            if self.phase[0] == "exchange":
                self.failed_exchange = self.phase[1]
            raise
        finally:
            left = self.leaving.left  # set if sys.exit ends the block, as in a hook of backward
            self.enter(*before)
            self.leaving.left = left

    def waiting(self, call: str) -> AbstractContextManager[None]:
        """Context manager: this rank is in a call that ends only when all ranks have reached it."""
        return self.within("call", place_of(call))

    def hear_phases(self, hear: Callable[[str, str], None]) -> None:
        """Call `hear` with every phase and call that this rank enters."""
        self._phases_heard.append(hear)

    def say(self, text: str, what: str = "") -> None:
        """Print a line on stderr on rank 0; only the first for each `what`, or for each text."""
        if self.world.rank == 0 and (what or text) not in self._said:
            say(text)
        self._said.add(what or text)

    def replace(self, owner: Any, name: str, replacement: Any) -> Any:
        """Set an attribute, as a function of a module, until the group is closed; returns what it was."""
        original = getattr(owner, name)
        self._replaced.append((owner, name, original))
        setattr(owner, name, replacement)
        return original

    def set_variable(self, name: str, value: str) -> None:
        """Set a variable of the environment until the group is closed."""
        self._variables.setdefault(name, os.environ.get(name))
        os.environ[name] = value

    def close(self) -> bool:
        """Collective. Close the members, wait for the other ranks for a moment, and leave the process groups."""
        # Gloo's threads abort a process that exits under them, and a peer that is still sending does the same: so the
        # replicas go first, then all ranks come together, then the groups are destroyed. False where a member could not
        # save what it held.
        saved = True
        self._marks.clear()
        self._phases_heard.clear()
        self._closed.set()
        self.enter("end", self.leaving.left)
        if self._watch is not None:
            self._watch.close()
        for member in reversed(self._members.values()):
            try:
                member.close()
            except SamestepError as error:
                saved = False
                say(str(error))
                write_failure(os.environ, error.with_traceback(None), 1)
        self._members.clear()
        while self._replaced:
            setattr(*self._replaced.pop())
        if self._tree is not None:
            gc.collect()
            self.leaving.meet()
            if self._tree.lost is not None:
                self.leaving.status = self.leaving.status or 1
            self._tree.leave(self.phase[1].removeprefix(f"{LEFT} ") or self._place)
            self._tree = None
        if dist.is_initialized():
            with suppress(RuntimeError):
                dist.destroy_process_group()
        self.leaving.remove_hooks()
        restore_environment(self._variables)
        return saved

    def _exchange(
        self, call: str, mine: Sequence[Item], join: Join, patience: timedelta | None = None
    ) -> list[Item]:
        """Collective. The items that rank 0 joined from all ranks' items; compares the marks of `watch` too."""
        if self._tree is None:
            return join(mine)
        if os.getpid() != self._pid:
            raise UsageError(
                f"{call} was called in a child process of rank {self.world.rank}, which is not a rank; call it in the "
                "rank itself"
            )
        watched = tuple(self._marks)
        marked = item_of(self.world.rank, [mark() for mark, _ in watched])._replace(kind="marks")

        def joined(items: Sequence[Item]) -> list[Item]:
            rest = [item for item in items if item.kind != "marks"]
            return [*merged(of_kind("marks", items)), *join(rest)]

        limit_s = (patience or self.timeout).total_seconds()
        self._place = place_of(call)
        with self.within("call", self._place):
            answer = exchange(self._tree, self._place, [marked, *mine], joined, limit_s)
        if len(found := of_kind("marks", answer)) > 1:
            columns = zip(*by_rank(found, self.world.size), strict=False)
            for (_, differ), values in zip(watched, columns, strict=False):
                if any(value != values[0] for value in values):
                    differ(list(values), call)
        return [item for item in answer if item.kind not in ("place", "marks")]


def open_pulse(rank: int, timeout: timedelta) -> Pulse | None:
    """This rank's pulse, in which it waits in init from now on; if asked, it writes its threads' stacks."""
    if (path := pulse_of(os.environ, rank)) is None:
        return None
    try:
        pulse = Pulse(path, patience_s=timeout.total_seconds())
        pulse.enter("call", place_of("samestep.init"))
        if STACK_SIGNAL is not None:
            stacks = stack_path(path.parents[1], rank)
            file = os.open(stacks, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
            pulse.stacks = open(file, "ab", buffering=0)  # noqa: SIM115
            # it keeps the file, and writes also while a thread holds the GIL; children do so too
            faulthandler.register(STACK_SIGNAL, pulse.stacks, all_threads=True)
        return pulse
    except OSError as error:
        say(
            f"{path} cannot be written ({reason_of(error)}); the run goes on, and its steps are not shown there"
        )
        return None


def restore_environment(before: Mapping[str, str | None]) -> None:
    """Restore these variables' values; None removes a variable."""
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
