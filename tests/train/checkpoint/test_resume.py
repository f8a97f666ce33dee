"""A run that was left at any step goes on with the next sample, at any size; exact ones end with the same bits."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from trail import Trail, differing_bits

TESTS = Path(__file__).parents[2]
SURVIVOR = TESTS / "survivor.py"
STEPS = 12


def go(nest, trail, size, *options, attempt=1):
    """One attempt to its end."""
    ranks = nest.start(SURVIVOR, size, trail.directory, "--notes", trail.log, "--attempt", attempt, *options)
    assert nest.wait(ranks) == [0] * size, "\n".join(rank.said for rank in ranks)
    return ranks


@pytest.fixture(scope="module")
def undisturbed(nest, tmp_path_factory):
    """An exact run at one rank."""
    trail = Trail(tmp_path_factory.mktemp("undisturbed"))
    go(nest, trail, 1)
    return trail


def left_after_every_step(nest, trail, sizes, *options):
    for step in range(1, STEPS):
        size = sizes[step % len(sizes)]
        ranks = go(nest, trail, size, "--stop-at", step, *options, attempt=step)
        if step > 1:
            assert f"samestep: going on after step {step - 1} from {trail.directory}" in ranks[0].said
    go(nest, trail, sizes[0], *options, attempt=STEPS)


@pytest.mark.slow
def test_left_after_every_step_an_exact_run_ends_with_the_same_bits_at_changing_sizes(
    nest, undisturbed, tmp_path
):
    trail = Trail(tmp_path)
    left_after_every_step(nest, trail, (1, 2, 3, 2))
    assert len(trail.taken()) == STEPS
    assert trail.against(undisturbed) == (0, 0)
    assert differing_bits(trail.state(), undisturbed.state()) == 0


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 3), (3, 2, 1)], ids=str)
def test_in_default_mode_changing_sizes_lose_no_sample_and_take_none_twice(
    nest, undisturbed, tmp_path, sizes
):
    trail = Trail(tmp_path)
    left_after_every_step(nest, trail, sizes, "--loader")
    ledger = ("train", "ledger")
    assert trail.against(undisturbed) == (0, 0)
    assert trail.state()[ledger] == undisturbed.state()[ledger]


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3])
def test_in_default_mode_the_same_size_draws_the_same_and_up_to_two_ranks_end_with_the_same_bits(
    nest, tmp_path, size
):
    whole, cut = Trail(tmp_path / "whole"), Trail(tmp_path / "cut")
    go(nest, whole, size, "--loader")
    for attempt, step in enumerate((1, 4, 7, 0)):
        go(nest, cut, size, "--loader", "--stop-at", step, attempt=attempt)
    assert cut.against(whole) == (0, 0)
    ours, theirs = cut.state(), whole.state()
    if size == 3:
        # where a gradient lies in DDP's buckets changes after the first step, and with it the order of a sum
        weights = ("model", "0.weight")
        np.testing.assert_allclose(
            *(np.frombuffer(state.pop(weights), "<f4") for state in (ours, theirs)), atol=1e-5
        )
        drawn = (("samestep", "streams"), ("counter", "drawn"), ("train", "ledger"))
        ours, theirs = ({key: state[key] for key in state if key[:2] in drawn} for state in (ours, theirs))
    assert differing_bits(ours, theirs) == 0


@pytest.mark.long
def test_with_loader_workers_the_samples_own_noise_is_the_same_after_a_resume(nest, undisturbed, tmp_path):
    trail = Trail(tmp_path)
    go(nest, trail, 2, "--stop-at", 5, "--workers", 1)
    go(nest, trail, 3, "--workers", 2, attempt=2)
    assert differing_bits(trail.state(), undisturbed.state()) == 0


def test_a_finished_run_takes_no_further_step_and_further_epochs_go_on(nest, undisturbed, tmp_path):
    trail = Trail(tmp_path)
    for attempt, (epochs, size) in enumerate([(1, 2), (1, 1), (2, 3), (3, 1)]):
        go(nest, trail, size, "--epochs", epochs, attempt=attempt)
    assert [list(attempts) for _, attempts in sorted(trail.taken().items())] == [[0]] * 4 + [[2]] * 4 + [
        [3]
    ] * 4
    assert differing_bits(trail.state(), undisturbed.state()) == 0


@pytest.mark.slow
def test_commits_are_made_by_time_too_and_make_no_difference(nest, undisturbed, tmp_path):
    trail = Trail(tmp_path)
    ranks = nest.start(SURVIVOR, 2, trail.directory, "--notes", trail.log, "--every", 0.3, "--pause", 0.1)
    while len(trail.taken()) < 9:
        nest.look(0.02)
    ranks[0].kill()
    nest.wait(ranks)
    steps = [int(re.search(r"step-(\d+)", path.name)[1]) for path in trail.directory.glob("0*")]
    assert 2 <= max(steps) <= 9
    go(nest, trail, 2, attempt=2)
    assert differing_bits(trail.state(), undisturbed.state()) == 0


@pytest.mark.slow
def test_runs_survive_kills_at_any_time_and_end_with_the_bits_of_the_undisturbed_run():
    loop = [sys.executable, TESTS / "kill_loop.py", "--kills", "7"]  # each kind once
    done = subprocess.run(loop, capture_output=True, text=True, timeout=55)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(
        r"faults 7 \| survived 7 \| .* \| samples lost 0, twice 0 \| bits differing 0", done.stdout
    )


def test_a_run_that_goes_on_with_another_version_of_torch_says_so(nest, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("""
import sys, torch, samestep
torch.__version__ = torch.torch_version.TorchVersion(sys.argv[1])
train = samestep.loader(torch.utils.data.TensorDataset(torch.ones(4, 2)), 4)
run = samestep.Checkpoint("commits", train=train)
run.resume()
for epoch in train.epochs(int(sys.argv[2])):
    for batch in train:
        run.step()
""")
    said = []
    for epochs, version in enumerate(("2.0.1", "2.0.1", "2.0.2"), 1):
        (rank,) = nest.start(script, 1, version, epochs, cwd=tmp_path)
        assert nest.wait([rank]) == [0], rank.said
        said.append([line for line in rank.said.splitlines() if "bits" in line])
    assert said == [[], [], ["samestep: torch was 2.0.1 and is 2.0.2; bits may differ from here on"]]
