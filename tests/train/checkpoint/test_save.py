"""One writer, the whole file or the old one, and a file that runs no code when it is read."""

import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import samestep
from samestep import CheckpointError


def test_what_is_saved_is_read_by_load_and_by_torch(world, tmp_path):
    path = tmp_path / "model.pt"
    state = {"weight": torch.full((2,), float(world.rank)), "more": {"step": 3, "name": "x", "none": None}}
    samestep.save(path, state)
    for read in (samestep.load(path), torch.load(path, weights_only=True), samestep.load(str(path))):
        assert read["weight"].tolist() == [0.0, 0.0]
        assert read["more"] == state["more"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.pt"]


def test_the_state_of_a_loader_with_a_sampler_is_read_by_load(world, tmp_path):
    data = torch.utils.data.TensorDataset(torch.arange(12.0))
    sampler = torch.utils.data.WeightedRandomSampler(torch.ones(12), 12)
    train = samestep.loader(data, 4, sampler=sampler)
    next(iter(train))
    samestep.save(tmp_path / "state.pt", train.state_dict())
    assert samestep.load(tmp_path / "state.pt") == train.state_dict()


def test_a_replicated_models_state_fits_the_plain_model(world, tmp_path):
    model = samestep.replicate(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), sync_batchnorm=True)
    samestep.save(tmp_path / "m.pt", model.state_dict())
    nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).load_state_dict(torch.load(tmp_path / "m.pt"))


def test_prefixes_of_ddp_are_dropped_where_all_keys_have_them(world, tmp_path):
    path = tmp_path / f"{world.rank}.pt"
    torch.save({"module.a": torch.ones(1), "module.module.b": 1}, path)
    assert list(samestep.load(path)) == ["a", "module.b"]
    torch.save({"epoch": 3, "model": {"module.a": 1}, "optimizer": {"state": {0: 1}}}, path)
    assert samestep.load(path) == {"epoch": 3, "model": {"a": 1}, "optimizer": {"state": {0: 1}}}
    torch.save({"module.a": 1, "b": 2}, path)
    assert list(samestep.load(path)) == ["module.a", "b"]
    torch.save({}, path)
    assert samestep.load(path) == {}


def test_a_link_stays_and_what_it_points_to_is_replaced(world, tmp_path):
    real, link = tmp_path / "on-scratch" / "m.pt", tmp_path / "m.pt"
    if world.rank == 0:
        real.parent.mkdir()
        link.symlink_to(real)
    for step in range(2):
        samestep.save(link, {"step": step})
    assert link.is_symlink()
    assert samestep.load(real) == {"step": 1}


def test_a_rank_with_a_directory_of_its_own_gets_a_copy_there(world, tmp_path):
    """As in a temporary directory, which rank 0 may remove at once; each rank then reads what it believes it saved."""
    own = Path(tempfile.mkdtemp(dir=tmp_path))
    samestep.save(own / "m.pt", {"of": world.rank})
    if world.rank == 0:
        (own / "m.pt").unlink()
    else:
        assert samestep.load(own / "m.pt") == {"of": 0}
    samestep.save(own / "m.pt" if world.rank == 0 else own / "not-there" / "m.pt", {})


def test_an_error_of_rank_0_is_raised_on_all_ranks_and_the_old_file_stays(world, tmp_path):
    with pytest.raises(
        CheckpointError, match=r"not-there/m.pt cannot be written \(no such file or directory\)"
    ):
        samestep.save(tmp_path / "not-there" / "m.pt", {})
    path = tmp_path / "m.pt"
    samestep.save(path, {"step": 1})
    with pytest.raises(
        CheckpointError, match=r"m.pt cannot be written \(.*lambda.*\); what was there is intact"
    ):
        samestep.save(path, {"step": lambda: 2})
    with pytest.raises(CheckpointError, match=r"cannot be written \(it is not a regular file\)"):
        samestep.save(tmp_path, {"step": 1})
    assert samestep.load(path) == {"step": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.pt"]
    assert samestep.sum(1) == world.size


def test_an_error_that_is_being_handled_is_not_taken_for_that_of_a_save(tmp_path):
    class Odd:
        def __reduce__(self):
            raise RuntimeError("no bytes")

    try:
        raise OSError(28, "No space left on device")
    except OSError:
        with pytest.raises(CheckpointError, match=r"m.pt cannot be written \(no bytes\)"):
            samestep.save(tmp_path / "m.pt", {"step": Odd()})


@pytest.mark.slow
def test_what_ends_a_file_in_the_middle_is_said_in_the_systems_words(tmp_path):
    source = """
import resource, samestep, sys, torch
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, -1))
samestep.save(sys.argv[1], {"weights": torch.ones(100_000)})
"""
    path = tmp_path / "m.pt"
    command = [sys.executable, "-c", source, path]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert f"CheckpointError: {path} cannot be written (file too large); what was" in ended.stderr
    assert not list(tmp_path.iterdir())


RAN = Path(tempfile.gettempdir(), f"samestep-ran-code-{os.getpid()}")


class Evil:
    def __reduce__(self):
        return os.system, (f"touch {RAN}",)


def test_files_that_carry_code_are_refused_and_not_run(tmp_path):
    path = tmp_path / "evil.pt"
    for write in (lambda: torch.save(Evil(), path), lambda: path.write_bytes(pickle.dumps(Evil()))):
        write()
        with pytest.raises(
            CheckpointError, match=r"evil.pt is not a file of plain weights \(.*\); save a state_dict"
        ):
            samestep.load(path)
    assert not RAN.exists()


def test_what_else_a_file_holds_is_named_when_it_is_saved_and_read(tmp_path, capsys):
    path = tmp_path / "best.pt"
    samestep.save(path, {"accuracy": 0.9})
    assert not capsys.readouterr().err
    samestep.save(path, {"accuracy": np.float64(0.9)})
    assert re.fullmatch(
        r"samestep: \S+best.pt is written, and holds numpy\.\S+, numpy\.dtype, which torch.load\(weights_only=True\) "
        r"does not read; save a state_dict, numbers as float\(x\) and arrays as tensors\n",
        capsys.readouterr().err,
    )
    with pytest.raises(
        CheckpointError, match=r"\(it holds a numpy\.\S+\.scalar\); .* numbers as float\(x\)$"
    ):
        samestep.load(path)


def test_whatever_is_wrong_with_a_file_is_one_sentence_that_names_it(tmp_path):
    with pytest.raises(CheckpointError, match=r"none.pt is not there; save it first"):
        samestep.load(tmp_path / "none.pt")
    path = tmp_path / "m.pt"
    torch.save({"a": torch.ones(100), "b": [1, 2]}, path)
    whole = path.read_bytes()
    draw = torch.Generator().manual_seed(0)
    damaged = [b"", b"text", whole[:100], whole[: len(whole) // 2]]
    for _ in range(300):
        at = int(torch.randint(len(whole), (1,), generator=draw))
        damaged.append(whole[:at] + bytes([whole[at] ^ 0x41]) + whole[at + 1 :])
    said = set()
    for data in damaged:
        path.write_bytes(data)
        try:
            samestep.load(path)
        except CheckpointError as error:
            said.add(str(error))
    assert said
    assert all("m.pt is not a file of plain weights (" in text and "\n" not in text for text in said)


@pytest.mark.parametrize("name", ["m.pt", "ü" * 120 + ".pt"])
def test_the_next_save_removes_what_killed_writers_of_this_file_left_and_nothing_else(tmp_path, name):
    killed = (
        "import os, pathlib, sys\nfrom samestep.files import write_atomically\n"
        "write_atomically(pathlib.Path(sys.argv[1]), lambda file: os.kill(os.getpid(), 9))"
    )
    for path in (tmp_path / name, tmp_path / "other"):
        subprocess.run([sys.executable, "-c", killed, path])
    (left,) = [path.name for path in tmp_path.iterdir() if path.name[1] == name[0]]
    place, number, nonce = left.rsplit("-", 2)
    of_living, of_another_machine = (
        f"{place}-{os.getppid()}-{nonce}",
        f"{place[:-16]}{'0' * 16}-{number}-{nonce}",
    )
    for other in (of_living, of_another_machine):
        (tmp_path / other).touch()
    before = {path.name for path in tmp_path.iterdir()}
    samestep.save(tmp_path / name, {})
    assert {path.name for path in tmp_path.iterdir()} == before - {left} | {name}


@pytest.mark.slow
def test_a_writer_killed_at_any_moment_leaves_the_old_file_or_the_new_one(tmp_path):
    path = tmp_path / "m.pt"
    source = f"""
import torch, samestep
from samestep.train.checkpoint.save import save
weights = torch.ones(4_000_000)
for step in range(1, 1000):
    save({str(path)!r}, {{"step": step, "weights": weights * step}})
    print(step, flush=True)
"""
    writer = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    with writer.stdout:
        writer.stdout.readline()
        time.sleep(0.2)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    state = samestep.load(path)
    assert torch.equal(state["weights"], torch.full((4_000_000,), float(state["step"])))
