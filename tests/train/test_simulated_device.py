"""Races between streams, found without a GPU: copies of batches, exchanges in the tree, copies for a checkpoint."""

import gc
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from simulated import DEVICE, ORDERS, Device, Event, OnDevice, Stream
from torch.utils.data import IterableDataset, Subset, TensorDataset

from samestep.errors import UsageError
from samestep.state.directory import CheckpointDirectory
from samestep.train.checkpoint import capture, writer
from samestep.train.checkpoint.writer import Writer
from samestep.train.data.batches import _moved, on_device
from samestep.train.data.loader import Loader
from samestep.train.digest import bit_sums
from samestep.train.group.device import check_cublas
from samestep.train.group.group import Group
from samestep.train.group.world import World
from samestep.train.model import tree
from samestep.train.nested import map_tensors
from samestep.train.step import Spine

ROWS = torch.arange(48.0).reshape(12, 4)
EXPECTED = [(rows.float() * 2 + 1).sum(1) for rows in ROWS.split(2)]


class Graph:
    """As PyG's Data: an object with its own `.to`, whose tensors nobody else finds."""

    def __init__(self, x):
        self._x = [x]

    def to(self, device):
        return Graph(self._x[0].to(device, non_blocking=True))

    @property
    def x(self):
        return self._x[0]


def batches(kind):
    return (Graph(rows.clone()) if kind is Graph else [rows.clone()] for rows in ROWS.split(2))


def trained(found):
    """Some work on each batch, of which the script lets go at once, as a loop does."""
    results = []
    for batch in found:
        x = batch.x if isinstance(batch, Graph) else batch[0]
        results.append((x * 2 + 1).sum(1))
        del x, batch
    return [result.cpu() for result in results]


def right(results):
    return len(results) == len(EXPECTED) and all(map(torch.equal, results, EXPECTED))


def verdicts(monkeypatch, test, **planted):
    """For each order that the waits allow, whether the values were right."""
    found = []
    gc.freeze()  # what torch has imported by now stays, and looking at it takes 0.2 s each time
    for order in ORDERS:
        with monkeypatch.context() as patched, Device(patched, order, **planted):
            found.append(test())
        gc.collect()
    return found


def before_the_mend(batches, device, side):
    """How batches were copied before: the memory of tensors that are found is kept, that of objects is not."""
    waiting = None
    for batch in batches:
        with side:
            copied = _moved(batch, device)
        arrived = side.record_event()
        if waiting is not None:
            yield kept(*waiting)
        waiting = copied, arrived
    yield kept(*waiting)


def kept(batch, arrived):
    stream = torch.accelerator.current_stream()
    stream.wait_event(arrived)

    def keep(value):
        if isinstance(value, torch.Tensor):
            value.record_stream(stream)
        return value

    return map_tensors(keep, batch)


@pytest.mark.parametrize("kind", [list, Graph])
def test_a_copied_batch_is_whole_in_every_order(monkeypatch, kind):
    assert all(verdicts(monkeypatch, lambda: right(trained(on_device(batches(kind), DEVICE, Stream())))))


def test_before_the_mend_a_batch_object_was_overwritten_while_it_was_read(monkeypatch):
    """The fault that this simulation is for; tensors alone were right by `record_stream`."""

    def test(kind):
        return lambda: right(trained(before_the_mend(batches(kind), DEVICE, Stream())))

    assert all(verdicts(monkeypatch, test(list)))
    assert not all(verdicts(monkeypatch, test(Graph)))


@pytest.mark.parametrize("forgets_main", [False, True])
def test_a_wait_that_is_lost_shows_in_the_batches(monkeypatch, forgets_main):
    """Of the copies for the script, or of the script for the copies."""

    def forgets(stream):
        return (stream is Device.now.main) == forgets_main

    found = verdicts(
        monkeypatch, lambda: right(trained(on_device(batches(list), DEVICE, Stream()))), forgets=forgets
    )
    assert not all(found)


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """A group of one process that has two sums to exchange."""
    monkeypatch.setattr(tree, "layout", lambda count, size: HELD)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


HELD = [[(1, 0), (0, 2)]]


def exchanged():
    """Three vectors, each summed in the tree and then used by the script."""
    totals, expected = [], []
    for number in range(3):
        own = [torch.full((5,), float(number)).to(DEVICE) + 1, torch.arange(5.0).to(DEVICE) * 2]
        totals.append(tree.add_up(dict(zip(HELD[0], own, strict=True)), own[0], 3) * 1)
        expected.append(torch.arange(5.0) * 2 + number + 1)
        del own
    torch.zeros(3).to(DEVICE)
    return all(torch.equal(total.cpu(), wanted) for total, wanted in zip(totals, expected, strict=True))


def test_sums_in_the_tree_are_right_in_every_order(monkeypatch, alone):
    assert all(verdicts(monkeypatch, exchanged))


@pytest.mark.parametrize("forgets_main", [False, True])
def test_a_wait_that_is_lost_shows_in_the_sums_of_the_tree(monkeypatch, alone, forgets_main):
    """Of the exchange for the script, or of the script for the exchange."""

    def forgets(stream):
        return (stream is Device.now.main) == forgets_main

    assert not all(verdicts(monkeypatch, exchanged, forgets=forgets))


def committed(directory):
    """What a checkpoint writes of a state that the next step changes at once."""
    weights = torch.arange(6.0).to(DEVICE)
    weights += 1
    state = {"model": {"weights": weights}}
    packed = Writer(CheckpointDirectory(directory, 2), DEVICE, print)._packed(state, {}, capture.bulk(state))
    found = torch.frombuffer(bytearray(packed.buffers[0]), dtype=torch.float32)
    weights.zero_()
    return torch.equal(found, torch.arange(6.0) + 1)


def test_a_commit_has_the_values_of_its_step_in_every_order(monkeypatch, tmp_path):
    monkeypatch.setattr(capture, "_refuse_foreign", lambda tensor, where: None)
    assert all(verdicts(monkeypatch, lambda: committed(tmp_path)))
    monkeypatch.setattr(writer, "synchronize", lambda device: None)
    assert not all(verdicts(monkeypatch, lambda: committed(tmp_path)))


def loaded(dataset, steps=6, **options):
    """An epoch of a loader whose device is the simulated one, and how often the script waited for it in the steps."""
    group = Group(World(0, 1, 0, 1, 0, 1, DEVICE, "alone"), None, {}, timedelta(minutes=1))
    loader = Loader(dataset, 2, False, False, None, options, group)
    results, before = [], []
    with torch.no_grad():
        assert sum(1 for _ in loader) == steps
    streams = len(Device.now.streams)
    for (x,) in loader:
        before.append(Device.now.waits)
        results.append((x * 2 + 1).sum(1))
        del x
    assert group.the(Spine).steps == steps
    assert len(Device.now.streams) == streams  # each has memory of its own
    waited = Device.now.waits - before[0]
    return right([result.cpu() for result in results]) and not waited


class Rows(IterableDataset):
    def __iter__(self):
        return ((row,) for row in ROWS)


@pytest.mark.parametrize("place", ["memory", "workers", "device", "stream"])
def test_a_loader_never_waits_for_the_device_wherever_its_data_is(monkeypatch, place):
    def test():
        if place == "workers":
            return loaded(Subset(TensorDataset(ROWS), range(12)), num_workers=0, pin_memory=False)
        if place == "stream":
            return loaded(Rows(), pin_memory=False)
        return loaded(TensorDataset(ROWS.to(DEVICE) if place == "device" else ROWS))

    assert all(verdicts(monkeypatch, test))


def test_sums_of_bits_take_one_transfer_from_each_device_also_of_buffers_elsewhere(monkeypatch):
    second = torch.device("cuda", 1)
    with Device(monkeypatch, 0) as device:
        own = [torch.ones(3), ROWS, ROWS[3:], torch.tensor(5)]
        tensors = [own[0], own[1].to(DEVICE), own[2].to(DEVICE), own[3].to(DEVICE)]
        before = device.waits
        assert bit_sums(tensors) == bit_sums(own)
        assert device.waits == before + 1
        tensors[1] = own[1].to(second)  # a model cut over two devices
        assert tensors[1].device == second
        before = device.waits
        assert bit_sums(tensors) == bit_sums(own)
        assert device.waits == before + 2


def test_the_simulated_device_computes_as_a_cpu_does(monkeypatch):
    """Views, operations in place, lists of tensors and results on the host."""
    for order in ORDERS:
        with monkeypatch.context() as patched, Device(patched, order):
            x = ROWS.to(DEVICE, non_blocking=True)
            y = x.clone()
            y[1:3] += 10
            torch._foreach_mul_([y, x], 2.0)
            left, right = torch.split(torch.cat([x, y]), 12)
            assert isinstance(left.t(), OnDevice)
            assert torch.equal((right - left).cpu()[1:3], torch.full((2, 4), 20.0))
            assert left.sum().item() == 2 * ROWS.sum().item()
            event = torch.accelerator.current_stream().record_event()
            assert isinstance(event, Event)
            event.synchronize()
            assert torch.equal(x.host, ROWS * 2)


def test_a_product_before_cublas_was_told_what_to_compute_is_a_sentence(monkeypatch):
    said = "Deterministic behavior was enabled, but CUBLAS_WORKSPACE_CONFIG=:4096:8 is not set"

    class Fails(Device):
        def computed(self, func, args, kwargs):
            if func is torch.ops.aten.mm.default:
                raise RuntimeError(said)
            return super().computed(func, args, kwargs)

    with (
        Fails(monkeypatch, 0),
        pytest.raises(UsageError, match=r"which is too late for exact=True; call .*init"),
    ):
        check_cublas(DEVICE)
    said = "out of memory"
    with Fails(monkeypatch, 0), pytest.raises(RuntimeError, match="out of memory"):
        check_cublas(DEVICE)
    with Device(monkeypatch, 0):
        check_cublas(DEVICE)
