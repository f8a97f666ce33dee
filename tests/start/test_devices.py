"""Devices are counted as torch would count them, and cores are shared without overlap."""

import os
from pathlib import Path

import pytest

from samestep.errors import UsageError
from samestep.start.devices import masked, share_cores, visible_devices


@pytest.fixture
def nvidia(tmp_path: Path) -> Path:
    """The files a machine with four NVIDIA devices has."""
    for number in range(4):
        (tmp_path / f"proc/driver/nvidia/gpus/0000:0{number}:00.0").mkdir(parents=True)
    return tmp_path


@pytest.fixture
def amd(tmp_path: Path) -> Path:
    """The files a machine with two AMD devices has; node 0 is the CPU."""
    for number, units in enumerate((0, 304, 304)):
        node = tmp_path / f"sys/class/kfd/kfd/topology/nodes/{number}"
        node.mkdir(parents=True)
        (node / "properties").write_text(f"cpu_cores_count 96\nsimd_count {units}\n")
    return tmp_path


@pytest.mark.parametrize(
    ("mask", "visible"),
    [
        (None, ["0", "1", "2", "3"]),
        ("2", ["2"]),
        ("3,1", ["3", "1"]),
        ("", []),
        ("-1", []),
        ("0,-1,2", ["0"]),
        ("GPU-8932f937-d72c, 1", ["GPU-8932f937-d72c", "1"]),
        ("MIG-GPU-8932f937/1/2", ["MIG-GPU-8932f937/1/2"]),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(nvidia, mask, visible):
    env = {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}
    assert visible_devices(env, nvidia) == visible


def test_without_the_driver_a_mask_makes_no_devices(tmp_path):
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "0,1"}, tmp_path) == []


def test_device_files_count_where_proc_is_hidden(tmp_path):
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    assert visible_devices({}, tmp_path) == ["0", "1"]


def test_amd_devices_are_those_with_compute_units(amd):
    assert visible_devices({}, amd) == ["0", "1"]
    assert visible_devices({"HIP_VISIBLE_DEVICES": "1"}, amd) == ["1"]
    assert masked({"ROCR_VISIBLE_DEVICES": "1"}, "0", amd) == ({"ROCR_VISIBLE_DEVICES": "1"}, 1)


def test_devices_are_chosen_among_the_visible_ones(nvidia):
    assert masked({}, "0,2", nvidia) == ({"CUDA_VISIBLE_DEVICES": "0,2"}, 2)
    assert masked({"CUDA_VISIBLE_DEVICES": "3,1"}, "1", nvidia) == ({"CUDA_VISIBLE_DEVICES": "1"}, 1)


@pytest.mark.parametrize(
    ("devices", "why"),
    [
        ("0,9", "names device 9, but 4 are visible"),
        ("a", "is no list of numbers"),
        ("", "is no list of numbers"),
        ("1,1", "names a device twice"),
    ],
)
def test_a_choice_that_cannot_be_is_a_sentence(nvidia, devices, why):
    with pytest.raises(UsageError, match=why):
        masked({}, devices, nvidia)


def test_devices_where_there_are_none_is_a_sentence(tmp_path):
    with pytest.raises(UsageError, match="none is visible here; use -n"):
        masked({}, "0", tmp_path)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_workers_share_the_cores_without_overlap_and_with_equal_threads(count):
    shares, threads = share_cores(count)
    assert len(shares) == count
    bound = [core for share in shares if share for core in share]
    assert len(bound) == len(set(bound))
    assert set(bound) <= os.sched_getaffinity(0)
    assert threads >= 1
    assert all(share is None or len(share) >= threads for share in shares)
