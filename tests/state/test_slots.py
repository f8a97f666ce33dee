"""A state in memory is taken for the newest only where it is whole and follows the newest commit of its run."""

import os
from contextlib import contextmanager

import pytest
import torch

from samestep.rundir import SLOTS
from samestep.state import lease
from samestep.state.directory import CheckpointDirectory
from samestep.state.slots import Slots, slots_of
from samestep.train.checkpoint import capture


def packed(step):
    return capture.pack({"step": step, "w": torch.full((1000,), float(step))}, {"step": step})


def read(name, dir_fd):
    return capture.read(name, dir_fd=dir_fd)[0]["step"]


@pytest.fixture
def memory():
    descriptors = [os.memfd_create(SLOTS[0]) for _ in SLOTS]
    yield descriptors
    for descriptor in descriptors:
        os.close(descriptor)


@contextmanager
def held(path, say=str):
    directory = CheckpointDirectory(path)
    directory.hold(lease.this_process(), say, "end it")
    yield directory
    directory.release()


def newest(path, memory, order=1):
    """What a process that is started now goes on from, and whether it is the memory's."""
    with held(path) as directory:
        found = directory.newest(read, Slots(memory[::order]))
    return found and (found.value, found.is_memory)


def remember(path, slots, *steps):
    for step in steps:
        with held(path) as directory:
            directory.remember(packed(step), step, slots)


def commit(path, step):
    with held(path) as directory:
        directory.commit(packed(step), step)


@pytest.mark.parametrize("order", [1, -1])
def test_the_newest_state_in_memory_follows_the_newest_commit(tmp_path, memory, order):
    slots = Slots(list(memory))
    remember(tmp_path, slots, 1)
    assert newest(tmp_path, memory, order) == (1, True)
    commit(tmp_path, 2)
    assert newest(tmp_path, memory, order) == (2, False)
    for step in (3, 4, 5):
        remember(tmp_path, slots, step)
        assert newest(tmp_path, memory, order) == (step, True)


def test_a_run_that_goes_on_from_memory_is_not_asked_to_resume(tmp_path, memory):
    said = []
    commit(tmp_path, 1)
    remember(tmp_path, Slots(list(memory)), 2)
    with held(tmp_path, said.append) as directory:
        assert directory.newest(read, Slots(memory)).is_memory
        directory.commit(packed(3), 3)
    assert newest(tmp_path, memory) == (3, False)
    assert not said


def test_a_slot_that_was_not_written_to_its_end_leaves_the_other(tmp_path, memory):
    commit(tmp_path, 1)
    remember(tmp_path, Slots(list(memory)), 2, 3)
    whole = os.pread(memory[1], 1 << 20, 0)
    for length in (0, 8, 200, len(whole) // 2, len(whole) - 1):
        os.ftruncate(memory[1], length)
        assert newest(tmp_path, memory) == (2, True)
        os.pwrite(memory[1], whole, 0)
    damaged = bytearray(whole)
    damaged[-100] ^= 1
    os.pwrite(memory[1], damaged, 0)
    assert newest(tmp_path, memory) == (2, True)
    os.pwrite(memory[0], damaged, 0)
    os.pwrite(memory[1], damaged, 0)
    assert newest(tmp_path, memory) == (1, False)


def test_what_was_refused_or_is_of_another_run_does_not_come_back(tmp_path, memory):
    commit(tmp_path / "one", 1)
    remember(tmp_path / "one", Slots(list(memory)), 9)
    commit(tmp_path / "other", 3)
    assert newest(tmp_path / "other", memory) == (3, False)
    assert [os.fstat(descriptor).st_size for descriptor in memory] == [0, 0]


def test_only_the_launchers_memory_is_taken_for_slots(tmp_path, memory):
    def env(descriptors):
        return {name: str(descriptor) for name, descriptor in zip(SLOTS, descriptors, strict=True)}

    assert slots_of(env(memory)) is not None
    assert slots_of({}) is None
    with open(tmp_path / "precious", "w+") as file:
        assert slots_of(env([file.fileno(), memory[0]])) is None
    assert slots_of(env([memory[0], 999])) is None


def test_a_state_that_takes_much_of_the_free_memory_is_not_kept_there(memory):
    assert Slots(memory).fit(1000)
    assert not Slots(memory).fit(1 << 50)
