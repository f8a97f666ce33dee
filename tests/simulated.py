"""A simulated device: its streams run queued operations late, in any order that the recorded waits allow.

New memory holds garbage until the operation that fills it has run, and freed memory is overwritten as soon as its
stream may give it away. So a missing wait shows in the values, on a machine without a GPU. As in CUDA's allocator,
memory belongs to the stream on which it was allocated, and is given to that stream's next allocation.
Stricter than CUDA: a non-blocking copy reads its source when the device runs it, whether that is pinned or not.
"""

import itertools
import random
import weakref
from collections import deque

import torch
import torch.cuda
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from samestep.train.model import tree

DEVICE = torch.device("cuda", 0)
ORDERS = range(8)  # 0: all late, 1: the script's stream first, 2: the others first, beyond: at random
_aten = torch.ops.aten
_numbers = itertools.count(1)


def spoil(tensor):
    """Overwrite with garbage."""
    torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).fill_(0xF7)


class OnDevice(torch.Tensor):
    """A tensor of the simulated device; `host` has the values that the operations which have run gave it."""

    @staticmethod
    def __new__(cls, host, memory, device=DEVICE):
        layout = {"strides": host.stride(), "storage_offset": host.storage_offset(), "dtype": host.dtype}
        made = torch.Tensor._make_wrapper_subclass(cls, host.shape, **layout, device=device)
        made.host, made.memory = host, memory
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} was called where no device is simulated")

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        # torch's own implementations of these call CUDA, which is not there
        if func is torch.Tensor.copy_:
            return Device.now.__torch_dispatch__(_aten.copy_.default, types, args, kwargs)
        if func is torch.Tensor.__getitem__:
            return part(*args)
        if func is torch.Tensor.__setitem__:
            return part(*args[:2]).copy_(args[2])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def record_stream(self, stream):
        self.memory.users.add(stream)


def part(view, index):
    """A tensor's view at an index of numbers and slices."""
    dim = 0
    for at in index if isinstance(index, tuple) else (index,):
        if isinstance(at, int):
            view = view.select(dim, at)
        else:
            start, stop, _ = at.indices(view.shape[dim])
            view, dim = view.narrow(dim, start, stop - start), dim + 1
    return view


class Memory:
    """An allocation, which lives as long as a tensor that lies in it; `users` are the streams recorded for it."""

    def __init__(self):
        self.users = set()


class Operation:
    """An entry of a stream's queue: `run` is called in its turn, and after the operation `after` of another stream."""

    def __init__(self, stream, run, after=None):
        self.stream, self.run, self.after, self.done = stream, run, after, False


class Stream(torch.Stream):
    def __new__(cls, device=None):
        return super().__new__(cls, next(_numbers), DEVICE.index, 1)

    def __init__(self, device=None):
        self.queue = deque()
        Device.now.streams.append(self)

    def wait_stream(self, other):
        self.wait_event(other.record_event())

    def wait_event(self, event):
        if not Device.now.forgets(self):
            Device.now.queue(self, lambda: None, event.mark)

    def record_event(self):
        event = Event()
        event.mark = Device.now.queue(self, lambda: None)
        return event

    def __enter__(self):
        self.before, Device.now.current = Device.now.current, self
        return self

    def __exit__(self, *_):
        Device.now.current = self.before


class Event:
    def __init__(self, device=None, *, enable_timing=False):
        self.mark = None

    def record(self):
        self.mark = Device.now.queue(Device.now.current, lambda: None)

    def query(self):
        return self.mark.done

    def elapsed_time(self, other):
        assert self.mark.done
        assert other.mark.done
        return 1.0

    def synchronize(self):
        Device.now.finish(self.mark)


class Future:
    """As torch's future with devices: `wait` makes the current stream wait, not the script."""

    def __init__(self, *, devices):
        assert devices == [DEVICE]

    def set_result(self, value):
        self.value, self.event = value, Device.now.current.record_event()

    def wait(self):
        Device.now.current.wait_event(self.event)
        return self.value


class Device(TorchDispatchMode):
    """While entered, torch's streams and the tensors of DEVICE are simulated."""

    now = None

    def __init__(self, monkeypatch, order, forgets=lambda stream: False):
        """`forgets` plants a mistake: where it is true of a stream, that stream's waits are lost."""
        super().__init__()
        Device.now, self.forgets = self, forgets
        self.streams, self.freed, self.waits = [], [], 0
        self.current = self.main = Stream()
        self.network = Stream()
        self.order, self.dice = order, random.Random(order)
        for place, name, new in (
            (torch, "Stream", Stream),
            (torch, "Event", Event),
            (torch.futures, "Future", Future),
            (torch.accelerator, "current_stream", lambda device=None: self.current),
            (torch.accelerator, "synchronize", self.synchronize),
            (torch.cuda, "_lazy_init", lambda: None),
            (dist, "all_to_all_single", self.all_to_all),
            (tree, "_all_gather", self.all_gather),
        ):
            monkeypatch.setattr(place, name, new, raising=False)

    def queue(self, stream, run, after=None):
        operation = Operation(stream, run, after)
        stream.queue.append(operation)
        if self.order == 1:
            self.run_free([self.main])
        elif self.order == 2:
            self.run_free([side for side in self.streams if side is not self.main])
        elif self.order:
            self.run_free(self.dice.sample(self.streams, self.dice.randrange(len(self.streams))))
        return operation

    def run_free(self, streams):
        """Run these streams' operations up to the first that has to wait."""
        for stream in streams:
            while stream.queue and (stream.queue[0].after is None or stream.queue[0].after.done):
                self.run_next(stream)

    def run_next(self, stream):
        operation = stream.queue[0]
        if operation.after is not None:
            self.finish(operation.after)
        stream.queue.popleft()
        operation.run()
        operation.done = True

    def finish(self, operation):
        while not operation.done:
            self.run_next(operation.stream)

    def synchronize(self, device=None):
        for stream in self.streams:
            while stream.queue:
                self.run_next(stream)

    def wait(self, operation):
        """The script waits for the device."""
        self.waits += 1
        self.finish(operation)

    def allocate(self, like):
        """A tensor in memory of the current stream; freed memory that it may get is overwritten."""
        freed, self.freed = self.freed, []
        for memory, stream, users in freed:
            if stream is self.current and all(user.done for user in users):
                self.queue(stream, lambda memory=memory: spoil(memory))
            else:
                self.freed.append((memory, stream, users))
        host = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="cpu")
        spoil(host)
        memory = Memory()
        weakref.finalize(memory, self.free, host, self.current, memory.users)
        return OnDevice(host, memory, self.device)

    def free(self, host, stream, users):
        self.freed.append((host, stream, [self.queue(user, lambda: None) for user in users]))

    def all_to_all(self, received, sent, *_, group=None):
        self.network.wait_stream(self.current)
        with self.network:
            received.copy_(sent)
        self.current.wait_stream(self.network)

    def all_gather(self, total, part, group=None):
        self.all_to_all(total, part)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        target = torch.device(kwargs.get("device") or "cpu").type
        devices = {leaf.device for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, OnDevice)}
        if len(devices) > 1:
            raise RuntimeError(f"{func} got tensors on several devices: {devices}")
        is_here = bool(devices)
        index = torch.device(kwargs.get("device") or "cpu").index or 0
        self.device = devices.pop() if devices else torch.device("cuda", index)
        if func in (_aten.is_pinned.default, _aten._pin_memory.default):
            return False if func is _aten.is_pinned.default else args[0].clone()
        if not is_here and target == "cpu":
            return func(*args, **kwargs)
        if func is _aten._to_copy.default and (not is_here or (target == "cpu" and "device" in kwargs)):
            return self.sent(args[0], kwargs.get("dtype"), is_here, kwargs.get("non_blocking"))
        if func is _aten.copy_.default and not (
            isinstance(args[0], OnDevice) and isinstance(args[1], OnDevice)
        ):
            return self.copied(*args, **kwargs)
        return self.computed(func, args, kwargs)

    def sent(self, source, dtype, is_here, non_blocking):
        plain = torch.empty_like(source.host if is_here else source, dtype=dtype, device="cpu")
        target = plain if is_here else self.allocate(plain)
        return self.copied(target, source, non_blocking)

    def copied(self, target, source, non_blocking=False):
        """A copy from or to the host."""
        into, of = (tensor.host if isinstance(tensor, OnDevice) else tensor for tensor in (target, source))
        if into is target:
            spoil(into)
        operation = self.queue(self.current, lambda: into.copy_(of))
        if not non_blocking:
            self.wait(operation)
        return target

    def computed(self, func, args, kwargs):
        def hosts(place):
            kinds = {OnDevice: lambda tensor: tensor.host, torch.device: lambda _: torch.device("cpu")}
            return tree_map(lambda leaf: kinds.get(type(leaf), lambda same: same)(leaf), place)

        own = hosts(args), hosts(kwargs)
        returns = func._schema.returns
        if not returns or str(returns[0].type) not in ("Tensor", "List[Tensor]"):
            if func._schema.is_mutable:
                self.queue(self.current, lambda: func(*own[0], **own[1]))
                return None
            self.wait(self.queue(self.current, lambda: None))
            return func(*own[0], **own[1])
        alias = returns[0].alias_info
        if alias is not None and not alias.is_write:
            memory = next(leaf.memory for leaf in tree_leaves(args) if isinstance(leaf, OnDevice))
            return tree_map(lambda view: OnDevice(view, memory, self.device), func(*own[0], **own[1]))
        if alias is not None:
            self.queue(self.current, lambda: func(*own[0], **own[1]))
            return kwargs.get("out", args[0] if args else None)

        def as_meta(leaf):
            if isinstance(leaf, torch.Tensor):
                return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
            return torch.device("meta") if isinstance(leaf, torch.device) else leaf

        made = func(*tree_map(as_meta, own[0]), **tree_map(as_meta, own[1]))
        made = tree_map(self.allocate, made)
        into = tree_leaves(hosts(made))

        def run():
            for target, value in zip(into, tree_leaves(func(*own[0], **own[1])), strict=True):
                target.copy_(value)

        self.queue(self.current, run)
        return made
