"""A checkpoint holds all that a run is, refuses what belongs to another one, and survives what disks do."""

import os
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from trail import Trail, differing_bits

from samestep.state import file
from samestep.train.checkpoint import capture as tensors

SURVIVOR = Path(__file__).parents[2] / "survivor.py"


def survive(nest, trail, size, *options):
    ranks = nest.start(SURVIVOR, size, trail.directory, "--notes", trail.log, "--epochs", 2, *options)
    return nest.wait(ranks), [rank.said for rank in ranks]


def steps(directory):
    return [entry.step for entry in file.listing(directory)]


CHANGES = {
    "batch_size": (["--batch", 24], "batch_size 12, not 24", "batch_size"),
    "seed": (["--seed", 5], "seed 0, not 5", "seed"),
    "length": (["--samples", 40], "length 46, not 40", "dataset"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_fact_is_refused_on_all_ranks_unless_it_is_meant(nest, tmp_path, change):
    options, words, meant = CHANGES[change]
    trail = Trail(tmp_path)
    assert survive(nest, trail, 1, "--stop-at", 2)[0] == [0]
    codes, said = survive(nest, trail, 2, *options)
    sentence = (
        f"CheckpointError: the checkpoint's train had {words}; use the same, or "
        f"Checkpoint(accept='{meant}') where the change is meant"
    )
    assert codes == [1, 1]
    assert all(f"samestep.errors.{sentence}\n" in text for text in said), said
    assert survive(nest, trail, 2, *options, "--accept", meant)[0] == [0, 0]
    epoch = trail.state()["train", "epoch"]
    assert epoch == b"2"


def test_other_samples_of_the_same_number_are_refused(run, tmp_path):
    source = """
        data.tensors[0][0] += float(sys.argv[1])
        run = samestep.Checkpoint("commits", model=model, train=train)
        run.resume()
        run.commit(wait=True)
    """.replace("commits", str(tmp_path / "commits"))
    assert run(source, 1, 0)[0] == [0]
    codes, said = run(source, 2, 1)
    assert codes == [1, 1]
    assert all(
        "the checkpoint's train had another dataset, not this run's; use the same, or "
        "Checkpoint(accept='dataset') where the change is meant" in text
        for text in said
    )


@pytest.mark.slow
def test_no_commit_is_left_out_because_another_is_being_written(run, tmp_path):
    source = """
        import time
        model.register_buffer("bulk", torch.zeros(30_000_000))
        run = samestep.Checkpoint("commits", every=10, keep=9, model=model)
        run.resume()
        for step in range(1, 30):
            run.step()
            if step > 20:
                time.sleep(0.2)
        for _ in range(2):
            run.step()
            run.commit()
    """.replace("commits", str(tmp_path / "commits"))
    assert run(source, 1)[0] == [0]
    *asked, late, first = steps(tmp_path / "commits")
    assert (asked[:2], first, 20 < late < 29) == ([31, 30], 10, True)


def test_a_run_that_commits_without_having_resumed_is_told_what_it_leaves_behind(run, tmp_path):
    source = f"""
        run = samestep.Checkpoint({str(tmp_path / "commits")!r}, every=1, model=model)
        for _ in range(3):
            run.step()
        run.commit(wait=True)
    """
    assert run(source)[1] == [""]
    said = "holds commits up to step 3, and this run began without them; call resume() before the first step to go on"
    assert run(source, 2)[1] == [f"samestep: {tmp_path / 'commits'} {said}\n", ""]


def test_a_resume_waits_for_the_commit_that_another_checkpoint_or_itself_is_writing(run, tmp_path):
    source = f"""
        weights = torch.nn.Linear(3000, 1000)
        first, second = (
            samestep.Checkpoint({str(tmp_path / "commits")!r}, weights=weights) for _ in range(2)
        )
        first.step()
        first.commit(wait=True)
        for checkpoint in (second, first, samestep.Checkpoint({str(tmp_path / "commits")!r}, weights=weights)):
            first.step()
            first.commit()
            assert checkpoint.resume() == first.steps
    """
    codes, said = run(source, 2)
    assert codes == [0, 0], said
    assert "older" not in said[0]


def test_an_epoch_in_another_order_is_begun_anew(nest, tmp_path):
    trail, other = Trail(tmp_path / "changed"), Trail(tmp_path / "other")
    survive(nest, trail, 1, "--stop-at", 6)
    survive(nest, trail, 1, "--seed", 5, "--accept", "seed", "--attempt", 2)
    survive(nest, other, 1, "--seed", 5)
    again = [by[2][1] for _, by in sorted(trail.taken().items()) if 2 in by]
    assert again == [by[0][1] for _, by in sorted(other.taken().items())][4:]


def test_other_parts_are_refused(run, tmp_path):
    source = f"""
        parts = dict(model=model, optimizer=optimizer) if len(sys.argv) == 1 else dict(model=model, train=train)
        run = samestep.Checkpoint({str(tmp_path / "commits")!r}, **parts)
        run.resume()
        run.commit(wait=True)
    """
    assert run(source)[0] == [0]
    codes, said = run(source, 2, "other")
    assert codes == [1, 1]
    assert all(
        "the checkpoint and this run differ in optimizer, train; give Checkpoint the same parts" in text
        for text in said
    )


WRONG = {
    "every=0, model=model": "every=0 is neither a number of steps nor a timedelta; use every=100 or a timedelta",
    "every=True, model=model": "every=True is neither a number of steps",
    "keep=1, model=model": "keep=1 leaves nothing to go back to when one file is damaged; use keep=2",
    "accept='size', model=model": "accept got size; use dataset, batch_size, seed, order",
    "every=3": "Checkpoint got no parts to keep; pass model=model, optimizer=optimizer, train=train",
    "samestep=model": "Checkpoint keeps its own state as samestep; give your part another name",
    "model=model, lr=0.1": "Checkpoint cannot keep lr, a float without state_dict and load_state_dict",
    "meter=type('Meter', (), {})()": "Checkpoint cannot keep meter, a Meter without state_dict and "
    "load_state_dict; give what has both, or a dict of values of your own, such as vars(meter)",
}


def test_what_cannot_be_is_said_at_once(run):
    source = "".join(
        f"\ntry: samestep.Checkpoint('commits', {arguments})\nexcept samestep.UsageError as error: print(error)"
        for arguments in WRONG
    )
    codes, said = run(source)
    assert codes == [0]
    assert all(
        line.startswith(words) for line, words in zip(said[0].splitlines(), WRONG.values(), strict=True)
    )


def test_a_part_whose_state_is_not_plain_is_refused_by_its_place(run, tmp_path):
    codes, said = run(f"""
        optimizer.param_groups[0]["why"] = object()
        run = samestep.Checkpoint({str(tmp_path / "commits")!r}, every=1, model=model, optimizer=optimizer)
        run.resume()
        run.step()
    """)
    assert codes == [1]
    assert "UsageError: optimizer.param_groups.0.why is an object, which a checkpoint cannot carry" in said[0]


def test_schedulers_scalers_and_own_objects_come_back_as_they_were(run, tmp_path):
    source = f"""
        import types
        from torch.optim import lr_scheduler as lr
        class Mine:
            best = 0.0
            def state_dict(self): return {{"best": self.best, "seen": [1, (2, "x")]}}
            def load_state_dict(self, state): self.best = state["best"]
        mine, meter = Mine(), types.SimpleNamespace(sum=0.0, count=0)
        parts = dict(
            step=lr.StepLR(optimizer, 2),
            cycle=lr.OneCycleLR(optimizer, 0.1, total_steps=50),
            plateau=lr.ReduceLROnPlateau(optimizer),
            warm=lr.CosineAnnealingWarmRestarts(optimizer, 5),
            chain=lr.SequentialLR(optimizer, [lr.LinearLR(optimizer), lr.MultiStepLR(optimizer, [2, 4])], [3]),
            scaler=torch.amp.GradScaler("cpu"),
            mine=mine, meter=vars(meter), model=model, optimizer=optimizer, train=train,
        )
        run = samestep.Checkpoint({str(tmp_path / "commits")!r}, **parts)
        if run.resume() == 0:
            for step in range(4):
                parts["scaler"].scale(model(torch.ones(2, 4)).sum()).backward()
                parts["scaler"].step(optimizer)
                parts["scaler"].update()
                for name in ("step", "cycle", "warm", "chain"):
                    parts[name].step()
                parts["plateau"].step(1.0)
                mine.best = 0.1 + 0.2
                meter.sum, meter.count = meter.sum + 0.25, meter.count + 1
                run.step()
            run.commit(wait=True)
        print(meter, {{name: part.state_dict() for name, part in parts.items() if name != "meter"}})
    """
    codes, said = run(source)
    assert codes == [0], said[0]
    again = run(source)[1][0]
    assert again.splitlines()[-1] == said[0].splitlines()[-1]
    assert "going on after step 4" in again


def test_the_room_a_state_takes_is_known_without_a_copy():
    tied = torch.randn(7, 5)
    state = {
        "a": tied,
        "b": tied,
        "t": tied.t(),
        "empty": torch.empty(0),
        "half": tied.half(),
        "raw": b"x" * 9,
    }
    assert tensors.bulk(state) == tensors.pack(state).bulk


def test_a_directory_that_is_not_there_is_a_beginning_and_is_made_by_the_first_commit(nest, tmp_path):
    trail = Trail(tmp_path)
    trail.directory = tmp_path / "deep" / "er"
    codes, said = survive(nest, trail, 2, "--stop-at", 1)
    assert (codes, said) == ([0, 0], ["", ""])
    assert trail.directory.stat().st_mode & 0o777 == 0o700
    assert steps(trail.directory) == [1]


def test_a_damaged_newest_is_named_and_the_older_one_used(nest, tmp_path):
    trail = Trail(tmp_path)
    survive(nest, trail, 1, "--every", 2, "--stop-at", 4)
    newest = trail.directory / file.listing(trail.directory)[0].name
    data = bytearray(newest.read_bytes())
    data[-3000] ^= 1
    newest.write_bytes(data)
    older = steps(trail.directory)[1]
    codes, said = survive(nest, trail, 2, "--attempt", 2)
    assert codes == [0, 0]
    assert re.match(
        rf"samestep: {newest.name} has a damaged \S+; an older checkpoint is used\n"
        rf"samestep: going on after step {older} from ",
        said[0],
    )
    assert said[1] == ""


def test_only_rank_0_looks_at_the_directory(run, tmp_path):
    source = f"""
        where = {str(tmp_path / "commits")!r} if world.rank == 0 else "/nowhere/at/all"
        run = samestep.Checkpoint(where, model=model, train=train)
        done = run.resume()
        weights = samestep.gather(model.weight.detach().reshape(1, -1))
        assert (weights == weights[0]).all()
        print(done, float(model.bias[0]))
        model.bias.data.fill_(7)
        run.steps += 1
        run.commit(wait=True)
    """
    run(source)
    codes, said = run(source, 3)
    assert codes == [0, 0, 0]
    assert all(text.endswith("1 7.0\n") for text in said), said


def test_as_many_are_kept_as_asked_and_no_file_is_left_unfinished(nest, tmp_path, run):
    codes, _ = run(f"""
        run = samestep.Checkpoint({str(tmp_path / "commits")!r}, every=1, keep=3, model=model, train=train)
        run.resume()
        for epoch in train.epochs(2):
            for _ in train:
                run.step()
                time.sleep(0.02)
    """)
    assert codes == [0]
    names = set(os.listdir(tmp_path / "commits")) - {".lease"}
    kept = {name[6:14] for name in names}
    assert len(kept) == len(names) == 3
    assert max(kept) == "-step-8-"
    assert all(name.endswith(".samestep") for name in names)


@pytest.mark.slow
def test_the_serial_world_lists_and_loads_what_was_committed(nest, tmp_path):
    trail = Trail(tmp_path)
    survive(nest, trail, 2)
    samestep = [sys.executable, "-m", "samestep"]
    listed = subprocess.run(
        [*samestep, "checkpoints", "--verify", trail.directory], capture_output=True, text=True
    )
    assert listed.returncode == 0
    assert re.search(r"^ +8 .* good +script=survivor.py digest=[0-9a-f]{12} torch=", listed.stdout, re.M)
    weights = tmp_path / "model.pt"
    subprocess.run([*samestep, "export", trail.directory, "-o", weights], check=True, capture_output=True)
    loaded = torch.load(weights, weights_only=True)
    assert set(loaded) >= {"0.weight", "1.running_mean", "4.bias"}
    assert loaded["0.weight"].numpy().tobytes() == trail.state()["model", "0.weight"]


@contextmanager
def small_disk(home, size):
    place = home / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
@pytest.mark.parametrize("size", [1, 2])
def test_on_a_full_disk_training_ends_the_good_commit_stays_and_the_exit_code_says_so(nest, tmp_path, size):
    with small_disk(tmp_path, "2m") as disk:
        trail = Trail(disk)
        options = ("--bulk", 300_000, "--every", 1)
        assert survive(nest, trail, size, "--stop-at", 3, *options)[0] == [0] * size
        before = trail.state()
        filler = disk / "filler"
        with filler.open("wb") as file:
            file.write(b"x" * (shutil.disk_usage(disk).free - 100_000))
        codes, said = survive(nest, trail, size, "--attempt", 2, *options)
        assert codes == [1] + [0] * (size - 1)
        assert len(re.findall(r"free on \S+; training goes on and tries again", said[0])) == 1
        assert re.search(
            r"checkpoint skipped: \S+ of \S+ kB free on \S+; the steps since 3 are in no checkpoint\n$",
            said[0],
        )
        assert len(trail.taken()) == 8
        assert differing_bits(trail.state(), before) == 0


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_when_there_is_room_again_commits_go_on_and_the_run_ends_well(nest, tmp_path):
    with small_disk(tmp_path, "2m") as disk:
        trail = Trail(disk)
        filler = disk / "filler"
        filler.write_bytes(b"x" * 1_800_000)
        argv = (
            trail.directory,
            "--notes",
            tmp_path / "log",
            "--every",
            1,
            "--bulk",
            300_000,
            "--pause",
            0.05,
        )
        ranks = nest.start(SURVIVOR, 2, *argv)
        while ranks[0].code is None and "tries again" not in ranks[0].said:
            nest.look(0.01)
        filler.unlink()
        assert nest.wait(ranks) == [0, 0], ranks[0].said
        assert steps(trail.directory)[0] == 12
        assert len(ranks[0].said.splitlines()) == 1


def test_a_directory_that_vanishes_costs_no_step_of_the_training(nest, tmp_path):
    trail = Trail(tmp_path)
    argv = (trail.directory, "--notes", trail.log, "--every", 1, "--pause", 0.05)
    ranks = nest.start(SURVIVOR, 2, *argv)
    while not trail.directory.exists() or not steps(trail.directory):
        nest.look(0.005)
    trail.directory.rename(tmp_path / "elsewhere")
    assert nest.wait(ranks) == [1, 0]
    assert f"samestep: checkpoint skipped: {trail.directory} is gone; training goes on" in ranks[0].said
    assert re.search(r"is gone; the steps since \d+ are in no checkpoint\n$", ranks[0].said)
    assert len(trail.taken()) == 12
    assert steps(tmp_path / "elsewhere")
