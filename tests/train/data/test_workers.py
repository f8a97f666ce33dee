"""Samples are read in the loop, or by workers where the script asks for them."""

import time

import psutil
import pytest
from torch.utils.data import Dataset

import samestep


class Scaled(Dataset):
    scale = 1

    def __len__(self):
        return 8

    def __getitem__(self, at):
        return self.scale * at


@pytest.mark.parametrize("workers", [0, 1, "auto"])
def test_what_the_loop_changes_in_the_dataset_counts_from_the_next_pass(world, workers):
    data = Scaled()
    loader = samestep.loader(data, 4, num_workers=workers)
    for data.scale in (1, 2, 3):
        assert sorted(samestep.gather([int(sample) for x in loader for sample in x])) == [
            data.scale * at for at in range(8)
        ]


def test_samples_are_read_in_the_loop_unless_workers_are_asked_for(world):
    data = [1] * 12
    seen = []
    for batch in samestep.loader(data, 4):
        seen += batch.tolist()
        data[:] = [10 * value for value in data]
    assert sorted(samestep.gather(seen)) == [1] * 4 + [10] * 4 + [100] * 4


def test_workers_that_persist_live_from_pass_to_pass_and_end_with_their_loader(world):
    loader = samestep.loader(Scaled(), 4, num_workers=1, persistent_workers=True)
    before = {process.pid for process in psutil.Process().children()}
    passes = []
    for _ in range(2):
        for _ in loader:
            passes.append({process.pid for process in psutil.Process().children()} - before)
            break
    pids, later = passes
    assert pids
    assert later == pids
    del loader
    until = time.monotonic() + 10
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_worker_init_fn_of_the_scripts_own_is_called(world, tmp_path):
    mark = tmp_path / str(world.rank)
    list(samestep.loader([1, 2, 3], 3, num_workers=1, worker_init_fn=lambda number: mark.touch()))
    assert mark.exists()


def test_a_data_set_that_leaves_the_script_in_the_loop_leaves_it(world):
    class Leaving(Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            raise SystemExit(3)

    with pytest.raises(SystemExit, match="3"):
        list(samestep.loader(Leaving(), 4, num_workers=0))
