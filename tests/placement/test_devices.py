"""Devices are counted as torch would count them; cores are those of affinity and quota, shared without overlap."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from samestep.errors import PlacementError, UsageError
from samestep.placement.devices import cores, masked, own_instance, share_cores, visible_devices
from samestep.placement.place import Placement, device_index, idle_devices


@pytest.fixture
def nvidia(tmp_path: Path) -> Path:
    """The files a machine with four NVIDIA devices has, two on each of two NUMA nodes of half its cores."""
    usable = sorted(os.sched_getaffinity(0))
    half = max(1, len(usable) // 2)
    (tmp_path / "dev").mkdir()
    for number in range(4):
        address = f"0000:0{number}:00.0"
        proc = tmp_path / f"proc/driver/nvidia/gpus/{address}"
        proc.mkdir(parents=True)
        (proc / "information").write_text(
            f"Model: \t\t NVIDIA H100\nGPU UUID: \t GPU-{number}aaa-bb\nDevice Minor: \t {number}\n"
        )
        (tmp_path / f"dev/nvidia{number}").touch()
        pci = tmp_path / f"sys/bus/pci/devices/{address}"
        pci.mkdir(parents=True)
        local = usable[:half] if number >= 2 else usable[half:]
        (pci / "local_cpulist").write_text(",".join(map(str, local)) + "\n")
    return tmp_path


@pytest.fixture
def amd(tmp_path: Path) -> Path:
    """The files a machine with two AMD devices has; node 0 is the CPU."""
    for number, units in enumerate((0, 304, 304)):
        node = tmp_path / f"sys/class/kfd/kfd/topology/nodes/{number}"
        node.mkdir(parents=True)
        (node / "properties").write_text(
            f"cpu_cores_count 96\nsimd_count {units}\nlocation_id {number << 8}\ndrm_render_minor {127 + number}\n"
        )
    (tmp_path / "dev/dri").mkdir(parents=True)
    for minor in (128, 129):
        (tmp_path / f"dev/dri/renderD{minor}").touch()
    return tmp_path


@pytest.fixture
def intel(tmp_path: Path) -> Path:
    """The files of a machine with a graphics unit in its processor, and two Intel cards."""
    (tmp_path / "dev/dri").mkdir(parents=True)
    for minor, address, kind in (
        (128, "0000:00:02.0", "0x030000"),
        (129, "0000:29:00.0", "0x038000"),
        (130, "0000:3a:00.0", "0x038000"),
    ):
        pci, drm = tmp_path / f"sys/devices/{address}", tmp_path / f"sys/class/drm/renderD{minor}"
        pci.mkdir(parents=True)
        (pci / "vendor").write_text("0x8086\n")
        (pci / "class").write_text(kind + "\n")
        drm.mkdir(parents=True)
        (drm / "device").symlink_to(pci)
        (tmp_path / f"dev/dri/renderD{minor}").touch()
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


def test_cuda_visible_devices_hides_amd_devices_too(amd):
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "1"}, amd) == ["1"]
    assert visible_devices({"CUDA_VISIBLE_DEVICES": ""}, amd) == []
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "0,1", "HIP_VISIBLE_DEVICES": "1"}, amd) == ["1"]
    assert masked({"CUDA_VISIBLE_DEVICES": "1,0"}, "0", amd) == ({"CUDA_VISIBLE_DEVICES": "1"}, 1)


def test_devices_that_a_container_cannot_open_do_not_count(nvidia):
    for number in (0, 3):
        (nvidia / f"dev/nvidia{number}").unlink()
    assert visible_devices({}, nvidia) == ["0", "1"]
    (nvidia / "dev/nvidia1").unlink()
    (nvidia / "dev/nvidia1").mkdir()  # cannot be opened for writing, by root either
    assert visible_devices({}, nvidia) == ["0"]


def test_an_amd_device_that_cannot_be_opened_does_not_count(amd):
    (amd / "dev/dri/renderD129").unlink()
    assert visible_devices({}, amd) == ["0"]


def test_intel_cards_count_without_a_mask_and_what_is_in_the_processor_does_not(intel):
    assert visible_devices({}, intel) == ["0", "1"]
    assert visible_devices({"ZE_AFFINITY_MASK": "1"}, intel) == ["1"]
    assert masked({}, "1", intel) == ({"ZE_AFFINITY_MASK": "1"}, 1)


def test_each_process_gets_a_mig_instance_of_its_own():
    """CUDA shows a process only the first instance of its mask: two processes would train on that one."""
    two = {"CUDA_VISIBLE_DEVICES": "MIG-aa,MIG-bb"}
    assert [own_instance(two, rank) for rank in (0, 1, 2)] == [
        {"CUDA_VISIBLE_DEVICES": "MIG-aa"},
        {"CUDA_VISIBLE_DEVICES": "MIG-bb"},
        {},
    ]
    for mask in ("MIG-aa", "0,1", "GPU-aa,GPU-bb", ""):
        assert own_instance({"CUDA_VISIBLE_DEVICES": mask}, 1) == {}
    assert own_instance({}, 1) == {}


def test_devices_are_chosen_among_the_visible_ones(nvidia):
    assert masked({}, "0,2", nvidia) == ({"CUDA_VISIBLE_DEVICES": "0,2"}, 2)
    assert masked({"CUDA_VISIBLE_DEVICES": "3,1"}, "1", nvidia) == ({"CUDA_VISIBLE_DEVICES": "1"}, 1)


@pytest.mark.parametrize(
    ("devices", "why"),
    [
        ("0,9", "names device 9, but 4 are visible"),
        ("a", "is not a list of numbers"),
        ("", "is not a list of numbers"),
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


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_cores_are_those_near_each_workers_device_whatever_its_rank(nvidia):
    usable = sorted(os.sched_getaffinity(0))
    half = len(usable) // 2
    # devices 0 and 1 are near the upper half of the cores, 2 and 3 near the lower one
    assert [set(share) for share in share_cores(2, {"CUDA_VISIBLE_DEVICES": "0,2"}, nvidia)[0]] == [
        set(usable[half:]),
        set(usable[:half]),
    ]
    by_uuid = {"CUDA_VISIBLE_DEVICES": "GPU-3aaa,GPU-1aaa"}
    assert [set(share) for share in share_cores(2, by_uuid, nvidia)[0]] == [
        set(usable[:half]),
        set(usable[half:]),
    ]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_two_workers_near_the_same_cores_share_them_without_overlap(nvidia):
    address = nvidia / "sys/bus/pci/devices/0000:01:00.0/local_cpulist"
    usable = sorted(os.sched_getaffinity(0))
    address.write_text(",".join(map(str, usable)))
    (nvidia / "sys/bus/pci/devices/0000:00:00.0/local_cpulist").write_text(address.read_text())
    shares, threads = share_cores(2, {"CUDA_VISIBLE_DEVICES": "0,1"}, nvidia)
    assert sorted(core for share in shares for core in share) == usable
    assert threads == min(map(len, shares))


def test_where_cores_near_a_device_are_too_few_they_are_shared_by_rank(nvidia):
    for number in range(4):
        near = nvidia / f"sys/bus/pci/devices/0000:0{number}:00.0/local_cpulist"
        near.write_text(f"{min(os.sched_getaffinity(0))}\n")
    assert share_cores(2, {}, nvidia) == share_cores(2, {}, nvidia / "nothing")


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity")
def test_cores_are_those_this_process_may_use():
    told = "import os; os.sched_setaffinity(0, [0]); from samestep.placement.devices import cores; print(cores())"
    assert subprocess.check_output([sys.executable, "-c", told], text=True) == "[0]\n"


@pytest.mark.root
@pytest.mark.skipif(len(cores()) < 2, reason="one core cannot be cut")
def test_cores_are_cut_to_the_control_groups_quota():
    version_1 = Path("/sys/fs/cgroup/cpu")
    folder, limit = (version_1, "cpu.cfs_quota_us") if version_1.is_dir() else (version_1.parent, "cpu.max")
    group = folder / f"samestep-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        if not (group / limit).exists():
            pytest.skip(f"this system's control groups have no {limit}")
        (group / limit).write_text("150000")
        told = "from samestep.placement.devices import cores; print(len(cores()))"
        inside = f'echo $$ > {group}/cgroup.procs && exec "$0" -c "{told}"'
        assert subprocess.check_output(["sh", "-c", inside, sys.executable], text=True) == "1\n"
    finally:
        group.rmdir()


@pytest.mark.parametrize(("local_rank", "visible", "index"), [(0, 0, None), (3, 1, 0), (0, 2, 0), (1, 2, 1)])
def test_the_device_is_the_only_visible_one_or_that_of_the_local_rank(local_rank, visible, index):
    assert device_index(Placement(local_rank, 4, local_rank, 4, 0, 1, "torchrun"), visible) == index


def test_more_processes_than_devices_are_refused():
    with pytest.raises(
        PlacementError, match="local rank 2 has no device of its own among the 2 that are visible"
    ):
        device_index(Placement(2, 4, 2, 4, 0, 1, "torchrun"), 2)


@pytest.mark.parametrize(
    ("local_size", "nodes", "launcher", "said"),
    [
        (1, 1, "alone", "1 process of this node uses 1 of them; `samestep run train.py` uses all"),
        (1, 2, "slurm", "1 process of this node uses 1 of them; write `srun --ntasks-per-node=4`"),
        (2, 2, "torchrun", "2 processes of this node use 2 of them; start 4 processes on each node"),
    ],
)
def test_rank_0_says_for_all_which_devices_no_process_uses(local_size, nodes, launcher, said):
    size = local_size * nodes
    ranks = [
        Placement(rank, size, rank % local_size, local_size, rank // local_size, nodes, launcher)
        for rank in range(size)
    ]
    lines = [idle_devices(placement, 4, "train.py") for placement in ranks]
    assert lines == [f"4 devices are visible and {said}", *[None] * (size - 1)]
    assert not any(idle_devices(placement, local_size, "train.py") for placement in ranks)
