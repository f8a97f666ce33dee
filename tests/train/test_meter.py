"""What a run's meter says of its steps agrees with clocks and sleeps that the script itself has."""

import json
import os
import re
import time
from pathlib import Path

import pytest
import torch

from samestep.rundir import pulse_path, read_pulse
from samestep.steptimes import PARTS, START_UP_STEPS, Breakdown, breakdown, read_step_times
from samestep.train.meter import _Clock

LOOP = """
    plan = json.loads(sys.argv[1])
    def pause(name):
        if plan.get("rank", world.rank) == world.rank:
            time.sleep(plan.get(name, 0))
    class Slow(torch.utils.data.Dataset):
        def __len__(self):
            return 42
        def __getitem__(self, at):
            pause("data")
            return torch.ones(4)
    class Wait(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()
        @staticmethod
        def backward(ctx, gradient):
            pause("backward")
            return gradient
    class Sgd(torch.optim.SGD):
        def step(self, closure=None):
            pause("optimizer")
            return super().step(closure)
    train = samestep.loader(Slow(), 3, num_workers=0)
    optimizer = Sgd(model.parameters(), lr=0.01)
    times, at, seen = [], time.monotonic(), 0
    for batch in train:
        seen += len(batch)
        pause("forward")
        Wait.apply(model(batch)).sum().backward()
        optimizer.step()
        pause("rest")
        if plan.get("call"):
            samestep.sum(1.0)
        now = time.monotonic()
        times.append(now - at)
        at = now
    print(json.dumps([times, seen]))
"""


@pytest.fixture
def metered(run, tmp_path):
    """Runs the loop above with pauses: what its clocks say, by rank, and what the meter says."""

    def started(size, asked="0", **plan):
        for folder in ("pulse", "logs"):
            (tmp_path / "run" / folder).mkdir(parents=True, exist_ok=True)
        env = {"SAMESTEP_RUN": str(tmp_path / "run"), "SAMESTEP_METER": asked}
        codes, said = run("    import json\n" + LOOP, size, json.dumps(plan), env=env)
        assert codes == [0] * size, said
        clocks = [json.loads(re.search(r"^\[\[.*$", text, re.MULTILINE)[0]) for text in said]
        files = {rank: read_step_times(tmp_path / "run" / "pulse" / f"steps-{rank}") for rank in range(size)}
        return clocks, files, said

    return started


@pytest.mark.parametrize("size", [1, 2, 3])
def test_parts_add_up_to_the_scripts_own_clock_and_samples_are_counted_exactly(metered, size, tmp_path):
    clocks, files, _ = metered(size, forward=0.01, data=0.002)
    for rank, (times, _) in enumerate(clocks):
        found = files[rank]
        mine = sum(times[START_UP_STEPS:]) / len(times[START_UP_STEPS:])
        assert sum(found.sums.values()) / found.progress.steps == pytest.approx(mine, rel=0.03)
        assert found.progress.step_s == pytest.approx(mine, rel=0.03)
        assert found.progress.rows == len(times) == 14
        assert sum(step.mine for step in found.steps) == found.progress.mine
        assert read_pulse(pulse_path(tmp_path / "run", rank)).step == 14
    assert sum(seen for _, seen in clocks) == 14 * 3
    assert sum(times.progress.mine for times in files.values()) == files[0].progress.all == 33
    said = breakdown(files)
    assert sum(said.parts.values()) == pytest.approx(said.step_s)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("part", ["data", "forward", "backward", "optimizer", "rest"])
def test_a_pause_is_counted_in_the_part_of_the_step_in_which_it_was(metered, size, part):
    _, files, _ = metered(size, **{part: 0.03})
    ranks = breakdown(files).ranks
    parts = {name: sum(rank[name] for rank in ranks) / size for name in PARTS}
    assert max(parts, key=parts.get) == part
    seconds = 0.03 * 3 / size if part == "data" else 0.03
    assert parts[part] > 0.95 * seconds


@pytest.mark.parametrize("call", [False, True])
def test_the_rank_that_the_others_wait_for_is_named(metered, call):
    _, files, _ = metered(3, forward=0.03, rank=1, call=call)
    said = breakdown(files)
    assert said.slowest == 1
    assert said.parts["slowest rank"] > 0.015  # two of three ranks wait 0.03 s
    assert "(rank 1)" in str(said)


def test_ranks_that_are_slow_in_turns_are_not_named(metered):
    _, files, _ = metered(2)
    steps = files[0].steps
    turns = [
        [
            step._replace(parts=tuple(0.01 * (at % 2 == rank) for _ in step.parts))
            for at, step in enumerate(steps)
        ]
        for rank in range(2)
    ]
    readings = {rank: type(files[0])(files[0].progress, files[0].sums, turns[rank]) for rank in range(2)}
    assert breakdown(readings).slowest is None


def test_the_last_line_is_rank_zeros_and_only_where_it_was_asked_for_or_the_run_was_long(metered):
    said = metered(2, asked="1", rest=0.01)[2]
    line = r"samestep: [\d,]+ samples/s, step [\d.]+ ms of 3 samples: .*compute \d+ %.*rest \d+ %"
    assert re.search(line, said[0])
    assert "samples/s" not in said[1]


def test_a_step_of_seconds_is_in_seconds():
    parts = dict.fromkeys(PARTS, 0.0) | {"forward": 3.17}
    said = Breakdown(3.17, 64 / 3.17, 640, {"compute": 3.17}, [parts], None, None)
    assert str(said) == "20 samples/s, step 3.17 s of 64 samples: compute 100 %"


@pytest.mark.parametrize("size", [1, 2])
def test_loaders_in_a_zip_make_steps_of_their_batches_together(run, tmp_path, size):
    for folder in ("pulse", "logs"):
        (tmp_path / "run" / folder).mkdir(parents=True)
    source = """
    rows = torch.utils.data.TensorDataset(torch.ones(48, 4))
    train, other, kept = samestep.loader(rows, 6), samestep.loader(rows, 4), iter(samestep.loader(rows, 2))
    for epoch in range(2):
        for (x,), (y,) in zip(train, other):
            (model(x).sum() + model(y).sum() + model(next(kept)[0]).sum()).backward()
            optimizer.step()
            time.sleep(0.02)
    """
    assert run(source, size, env={"SAMESTEP_RUN": str(tmp_path / "run")})[0] == [0] * size
    found = read_step_times(Path(tmp_path, "run", "pulse", "steps-0"))
    assert len(found.steps) == 2 * 8 - START_UP_STEPS
    assert {step.all for step in found.steps} == {6 + 4 + 2}
    assert min(step.seconds for step in found.steps) > 0.02


@pytest.mark.parametrize("size", [1, 2])
def test_the_last_line_is_printed_once_before_the_traceback_of_a_ctrl_c(run, size):
    source = """
    for epoch in range(3):
        for (x,) in train:
            model(x).sum().backward()
    raise KeyboardInterrupt
    """
    said = run(source, size, env={"SAMESTEP_METER": "1"})[1]
    assert re.findall(r"samples/s|Traceback", said[0]) == ["samples/s", "Traceback"]
    assert "samples/s" not in "".join(said[1:])


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="no core is left for a worker")
def test_a_loop_that_waits_for_data_is_told_of_workers(metered):
    hint = 'loader(..., num_workers="auto") would have'
    assert hint in metered(1, asked="1", data=0.01)[2][0]
    assert hint not in metered(1, asked="1", rest=0.1)[2][0]


@pytest.mark.parametrize("asked", ["0", ""])
def test_a_short_run_says_nothing(metered, asked):
    assert "samples/s" not in "".join(metered(1, asked=asked)[2])


def test_a_step_costs_the_meter_less_than_a_two_hundredth_of_ten_milliseconds():
    clock = _Clock(lambda *_: None, lambda *_: None)
    parts = ["data", "user", "forward", "user", "backward", "exchange"]
    parts += ["user", "backward", "user", "optimizer", "user"]
    best = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(200):
            for part in parts:  # as a step at two ranks has them
                clock.mark(part)
            clock.end((0, 1, 1))
        best.append((time.perf_counter() - began) / 200)
    assert min(best) < 0.005 * 0.010


def test_backward_is_torchs_own_again_when_the_group_is_closed(run):
    source = """
    for (x,) in train:
        model(x).sum().backward()
    assert torch.autograd._engine_run_backward.__module__ == "samestep.train.backward"
    from samestep.train.group.world import close
    close()
    assert torch.autograd._engine_run_backward.__module__ == "torch.autograd.graph"
    """
    assert run(source, 2)[0] == [0, 0]


@pytest.mark.parametrize(
    ("rank", "samples", "says"),
    [
        (
            "1",
            10,
            "samestep: the loss of rank 1 is nan in step 3, and the other ranks' losses are finite there",
        ),
        ("all", 10, ""),
        ("1", 5, ""),  # in step 3 rank 1 has no sample, so its loss counts for nothing
    ],
)
def test_the_rank_with_the_first_loss_that_is_not_finite_is_named_once(run, rank, samples, says):
    source = """
    few = torch.utils.data.Subset(data, range(int(sys.argv[2])))
    for at, (x,) in enumerate(samestep.loader(few, 2)):
        of_nan = at == 2 and sys.argv[1] in ("all", str(world.rank))
        loss = model(x).sum() * (float("nan") if of_nan else 1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    """
    codes, said = run(source, 2, rank, str(samples))
    assert codes == [0, 0], said
    lines = [line for text in said for line in text.splitlines() if "the loss of" in line]
    assert len(lines) == bool(says), said
    assert "".join(lines).startswith(says)


@pytest.mark.parametrize(
    ("cause", "says"), [("nan", "samestep: weight of Linear became nan"), ("scaler", "")]
)
def test_weights_that_became_nan_behind_finite_losses_are_said_once(run, cause, says):
    source = """
    scaler = torch.amp.GradScaler("cpu", init_scale=1e38, enabled=sys.argv[1] == "scaler")
    for at, (x,) in enumerate(samestep.loader(data, 2)):
        out = model(x)
        is_last_of_rank_1 = at == 5 and world.rank == 1 and not scaler.is_enabled()
        loss = out.sum() + (out - out).sqrt().sum() if is_last_of_rank_1 else out.sum()
        assert loss.isfinite()
        optimizer.zero_grad()
        scaler.scale(loss * 1e3 if scaler.is_enabled() else loss).backward()
        scaler.step(optimizer)
        scaler.update()
    """
    codes, said = run(source, 2, cause)
    assert codes == [0, 0], said
    lines = [line for text in said for line in text.splitlines() if " nan" in line]
    assert len(lines) == bool(says), said
    assert "".join(lines).startswith(says)


def test_steps_after_a_pass_that_was_left_are_counted(run, tmp_path):
    for folder in ("pulse", "logs"):
        (tmp_path / "run" / folder).mkdir(parents=True)
    source = """
    for epoch in range(3):
        for at, (x,) in enumerate(train):
            model(x).sum().backward()
            optimizer.step()
            if at == 2:
                break
        with torch.no_grad():
            for (x,) in samestep.loader(data, 3):
                time.sleep(0.1)
    """
    assert run(source, 1, env={"SAMESTEP_RUN": str(tmp_path / "run")})[0] == [0]
    found = read_step_times(Path(tmp_path, "run", "pulse", "steps-0"))
    assert found.progress.rows == 6  # a step that the loop breaks off has no end
    assert found.progress.between_s > 0.3
    assert found.progress.step_s < 0.1
    assert torch.isnan(torch.tensor(found.progress.loss)) or found.progress.loss != 0


def test_a_step_is_what_checkpoint_counts_and_the_time_left_is_that_of_the_steps_still_to_do(run, tmp_path):
    for folder in ("pulse", "logs"):
        (tmp_path / "run" / folder).mkdir(parents=True)
    source = """
    checkpoint = samestep.Checkpoint(sys.argv[1], every=1, model=model, train=train)
    checkpoint.resume()
    for epoch in train.epochs(4):
        for at, (x,) in enumerate(train):
            model(x).sum().backward()
            time.sleep(0.01)
            if at % 2:
                optimizer.step()
                checkpoint.step()
                if checkpoint.steps == int(sys.argv[2]):
                    checkpoint.commit(wait=True)
                    raise SystemExit
    """
    for stop in ("5", "7"):
        env = {"SAMESTEP_RUN": str(tmp_path / "run")}
        assert run(source, 1, str(tmp_path / "kept"), stop, env=env)[0] == [0]
        found = read_step_times(Path(tmp_path, "run", "pulse", "steps-0")).progress
        assert read_pulse(pulse_path(tmp_path / "run", 0)).step == int(stop)
        assert f"epoch {found.epoch + 1} of 4, step {stop}, " in str(found)
        # the batch that the script breaks off is among those that are still to do
        assert found.end - found.rows == 16 - 2 * int(stop) + 1


def test_a_stream_does_not_say_how_much_time_is_left(run, tmp_path):
    for folder in ("pulse", "logs"):
        (tmp_path / "run" / folder).mkdir(parents=True)
    source = """
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(torch.ones(30, 4))
    train = samestep.loader(Stream(), 3)
    for epoch in train.epochs(2):
        for x in train:
            model(x).sum().backward()
    """
    assert run(source, 1, env={"SAMESTEP_RUN": str(tmp_path / "run")})[0] == [0]
    found = read_step_times(Path(tmp_path, "run", "pulse", "steps-0")).progress
    assert found.samples_per_second > 0
    assert found.left_s is None
