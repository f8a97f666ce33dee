"""Loops of unusual shapes that were left after any step take the same steps as the undisturbed run."""

import re
from functools import partial
from textwrap import dedent

import pytest

from samestep.state import file

pytestmark = pytest.mark.slow
BEGIN = """
    import signal
    from torch.nn import functional as F
    torch.manual_seed(0)
    model.reset_parameters()
    data = torch.utils.data.TensorDataset(torch.randn(14, 4))
    other = samestep.loader(data, 5, shuffle=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    parts = dict(model=model, optimizer=optimizer, scheduler=scheduler, train=train, other=other)
    run = samestep.Checkpoint(sys.argv[1], every=1000, seen=(seen := {"calls": 0}), **parts)
    last, way = int(sys.argv[2]), sys.argv[3]
    def backward(x):
        loss = model(F.dropout(x)).square().mean()
        loss.backward()
        seen["calls"] += 1
        print("call", seen["calls"], loss.item())
    def step(x):
        backward(x)
        optimizer.step()
        optimizer.zero_grad()
    def count():
        run.step()
        if run.steps == last:
            if way == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            run.commit(wait=True)
            sys.exit()
    run.resume()
"""
END = """
    print("end", optimizer.param_groups[0]["lr"], model.weight.tolist())
"""
LOOPS = {
    "a pass within each step": """
        for epoch in train.epochs(3):
            for x, in train:
                for u, in other: step(u)
                step(x)
                count()
    """,
    "a new iterator in each step": """
        for epoch in train.epochs(3):
            for x, in train:
                u, = next(iter(other))
                step(torch.cat([x, u]))
                count()
    """,
    "a new iterator in each epoch, and where it ends": """
        for epoch in train.epochs(3):
            more = iter(other)
            for x, in train:
                try: u, = next(more)
                except StopIteration: more = iter(other); u, = next(more)
                step(u)
                step(x)
                count()
    """,
    "one loop after another": """
        for epoch in train.epochs(3):
            for x, in other: step(x); count()
            for x, in train: step(x); count()
    """,
    "one loop before another": """
        for epoch in train.epochs(3):
            for x, in train: step(x); count()
            for x, in other: step(x); count()
    """,
    "an evaluation with gradients": """
        for epoch in train.epochs(3):
            for x, in train: step(x); count()
            print("evaluated", epoch, sum(model(x).sum().item() for x, in other))
    """,
    "cycles, one in each epoch": """
        for epoch in train.epochs(3):
            for (x,), (u,) in zip(train, other.cycle()): step(u); step(x); count()
    """,
    "a cycle over all epochs": """
        cycle = other.cycle()
        for epoch in train.epochs(3):
            for x, in train: step(next(cycle)[0]); step(x); count()
    """,
    "accumulated gradients": """
        for epoch in train.epochs(3):
            for x, in train:
                backward(x)
                if seen["calls"] % 3 == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                count()
    """,
}
UNSYNCED = """
    for epoch in train.epochs(3):
        for x, in train:
            is_last = seen["calls"] % 3 == 2
            with samestep.no_sync(model, not is_last): backward(x)
            if is_last:
                optimizer.step()
                optimizer.zero_grad()
            count()
"""
COMMITTED = """
    for epoch in train.epochs(4):
        for x, in train: step(x); count()
        scheduler.step()
        with torch.no_grad(): print("evaluated", epoch, sum(model(x).sum().item() for x, in other))
        run.commit()
"""
PLAIN = """
    for epoch in train.epochs(2):
        for x, in train: step(x); count()
"""


@pytest.fixture
def said(run, tmp_path):
    """What the attempts of a run printed, the last word on each call."""

    def of(loop, size, name, *attempts, before=""):
        found = {}
        for last, way in attempts:
            source = before + "".join(map(dedent, (BEGIN, loop, END)))
            codes, texts = run(source, size, tmp_path / name, last, way)
            assert set(codes) <= ({0} if way != "kill" else {-9, 1}), texts
            found |= dict(re.findall(r"^((?:call|evaluated) \d+|end) (.*)$", texts[0], re.MULTILINE))
        return found

    return of


@pytest.mark.parametrize("name", LOOPS)
def test_a_run_that_was_left_takes_the_same_steps_whatever_its_loops(said, name):
    stops = [(stop, "commit") for stop in (1, 4, 6, 9)]
    assert said(LOOPS[name], 1, "cut", *stops, (0, "")) == said(LOOPS[name], 1, "whole", (0, ""))


def test_accumulated_gradients_are_those_of_all_ranks(said):
    whole = said(UNSYNCED, 2, "whole", (0, ""))
    cut = said(UNSYNCED, 2, "cut", (1, "commit"), (5, "commit"), (0, ""))
    assert cut.keys() == whole.keys()
    numbers = [[float(n) for n in re.findall(r"-?[\d.]+\d", str(texts))] for texts in (cut, whole)]
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-4)


def test_a_commit_does_not_change_accumulated_gradients(said):
    often = UNSYNCED.replace("count()", "run.commit(); count()")
    assert said(often, 3, "often", (0, "")) == said(UNSYNCED, 3, "never", (0, ""))


@pytest.mark.parametrize("stop", [5, 9])
def test_a_commit_after_an_epoch_is_made_with_the_next_epoch_and_runs_nothing_again(said, stop):
    assert said(COMMITTED, 1, "cut", (stop, "kill"), (0, "")) == said(COMMITTED, 1, "whole", (0, ""))


def test_a_commit_after_an_epoch_that_is_the_last_is_made_at_the_end_of_the_script(said, tmp_path):
    said(COMMITTED + "        break\n", 1, "broken", (0, ""))
    assert [entry.step for entry in file.listing(tmp_path / "broken")] == [4]


def test_ranks_that_resume_before_replicate_go_on_with_their_own_draws(said):
    loop = "model = samestep.replicate(model)\n" + dedent(PLAIN)
    of = partial(said, loop, 2, before="model = torch.nn.Linear(4, 3)\n")
    assert of("cut", (3, "commit"), (5, "commit"), (0, "")) == of("whole", (0, ""))


def test_ranks_of_a_commit_before_the_first_step_draw_apart(said):
    loop = "if not run.steps: run.commit()\n" + dedent(PLAIN)
    assert said(loop, 2, "cut", (3, "kill"), (0, "")) == said(loop, 2, "whole", (0, ""))
