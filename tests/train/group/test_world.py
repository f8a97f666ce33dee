"""Who this process is, who goes first, who is missing, and how processes leave."""

import os
import re
import time
from dataclasses import FrozenInstanceError
from datetime import timedelta

import psutil
import pytest
import torch

import samestep
from samestep import RanksDiffer, UsageError
from samestep.train.group.layout import Place
from samestep.train.group.world import _check_devices

FACTS = [
    *("rank", "size", "local_rank", "local_size", "node", "nodes", "device", "launcher"),
    *("cores", "host", "hosts"),
]
START = """
    import os, sys, time
    from datetime import timedelta
    import torch, samestep
    world = samestep.init(timeout=timedelta(seconds=30))
"""


def test_init_says_who_this_is_and_says_it_again(world):
    assert samestep.init() is world is samestep.init(backend="gloo")
    with pytest.raises(UsageError, match=r"a timeout of 5.0 s, .* its group with .* before them"):
        samestep.init(timeout=timedelta(seconds=5))
    assert list(vars(world)) == FACTS
    assert (world.size, world.local_size, world.node, world.nodes) == (world.local_size, world.size, 0, 1)
    assert world.rank == world.local_rank
    assert world.hosts == (world.host,)
    assert 1 <= world.cores * world.size <= max(world.size, os.cpu_count())
    assert world.device == torch.device("cpu")
    with pytest.raises(FrozenInstanceError):
        world.rank = 1
    ranks = samestep.gather([world.rank])
    assert ranks == list(range(world.size))


@pytest.mark.sizes(2, 3)
def test_the_variables_of_torch_are_there(world):
    expected = {"RANK": world.rank, "LOCAL_RANK": world.rank, "WORLD_SIZE": world.size, "GROUP_RANK": 0}
    expected |= {"LOCAL_WORLD_SIZE": world.size, "ROLE_RANK": world.rank, "ROLE_NAME": "default"}
    for name, value in expected.items():
        assert os.environ[name] == str(value)
    assert {
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_RESTART_COUNT",
    } <= os.environ.keys()
    assert "TORCHELASTIC_USE_AGENT_STORE" not in os.environ
    # a job that the script submits would inherit the name of an interface that its machines may not have
    assert not {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"} & os.environ.keys()


def test_one_process_of_the_node_goes_first(world, tmp_path):
    file = tmp_path / "download"
    with samestep.first():
        if world.local_rank == 0:
            time.sleep(0.2)
            file.write_text("whole")
        assert file.read_text() == "whole"
    assert samestep.sum(1) == world.size


@pytest.mark.sizes(2, 3)
def test_a_call_that_some_ranks_make_elsewhere_names_both_lines_and_all_ranks(world):
    with pytest.raises(RanksDiffer) as raised:
        samestep.gather([1]) if world.rank == 0 else samestep.sum(1)
    assert re.fullmatch(
        r"ranks are at different calls: rank \d at samestep.\w+ \(test_world.py:\d+\), ranks? [\d, ]+ at "
        r"samestep.\w+ \(test_world.py:\d+\); every rank has to make the same calls in the same order",
        str(raised.value),
    )


def test_what_init_refuses_is_told_below_the_scripts_own_line(nest, tmp_path):
    (tmp_path / "train.py").write_text("import samestep\nsamestep.init()\n")
    (rank,) = nest.start(tmp_path / "train.py", 1, env={"RANK": "3"}, cwd=tmp_path)
    assert nest.wait([rank], 40) == [1]
    assert "samestep.errors.PlacementError: RANK is 3" in rank.said
    assert re.findall(r"(\w+\.py)\", line \d+, in (?!exec|run)", rank.said)[-2:] == [
        "train.py",
        "world.py",
    ], rank.said


@pytest.mark.parametrize(("backend", "name"), [("'foo'", "foo"), ("5", "5"), ("torch.device('cpu')", "cpu")])
def test_a_backend_that_is_not_there_is_named(script, backend, name):
    ((_, _, error),) = script.run(f"import torch, samestep; samestep.init(backend={backend})", 1)
    assert f"UsageError: backend '{name}' is not in this build of torch; use one of gloo" in error


def test_ranks_of_unlike_environments_are_named_before_the_group_is_made(script):
    ranks = script.run(
        """
import os, time, torch.distributed as dist
import samestep
if os.environ["RANK"] == "2":
    time.sleep(1)  # a rank that came later still would find that rank 0 has left
    samestep.__version__ = "0.0.1"
try:
    samestep.init()
finally:
    print(dist.is_initialized())
""",
        3,
    )
    for code, out, err in ranks:
        assert (code, out) == (1, "False\n")
        assert re.search(
            r"RanksDiffer: samestep is 0\.1\.0 on rank 0 \(.+\) and 0\.0\.1 on rank 2 \(.+\); start every rank",
            err,
        )


def test_ranks_that_share_a_device_are_named():
    """As NCCL cannot; no machine with GPUs is needed to see that two of a node name the same one."""
    places = [(0, "x"), (0, "y"), (1, "x"), (1, "z"), (1, "x")]
    holders = [
        Place(node, f"host{rank}", f"cuda:{rank}", 1, "nccl", "", "", uuid)
        for rank, (node, uuid) in enumerate(places)
    ]
    _check_devices(holders[:4])
    with pytest.raises(UsageError) as raised:
        _check_devices(holders)
    assert str(raised.value) == (
        "ranks 2, 4 of 5 share one device (cuda:2 on host2), which NCCL cannot; start one process a device, "
        "or use init(backend='gloo')"
    )


def run(script, size, body, seconds=30):
    start = START.replace("seconds=30", f"seconds={seconds}")
    return script.run(start + body, size)


def codes(ranks):
    return [code for code, _, _ in ranks]


@pytest.mark.slow
def test_a_sleeping_rank_is_named_after_the_timeout(script):
    ranks = run(
        script,
        3,
        """
    if world.rank == 1:
        time.sleep(4)
    samestep.sum(1)
    """,
        seconds=2,
    )
    assert codes(ranks)[0] == codes(ranks)[2] == 1
    # whichever gives up first knows; the other may hear of its end instead
    assert re.search(
        r"RankMissing: rank 1 did not reach samestep.sum \(train.py:\d+\) within 2 s; ranks 0, 2 are waiting. "
        r"Is the call inside `if rank == 0`\?",
        ranks[0][2] + ranks[2][2],
    )


@pytest.mark.slow
def test_ranks_that_finish_the_script_are_named_by_the_one_that_still_calls(script):
    ranks = run(
        script,
        3,
        """
    if world.rank == 0:
        time.sleep(2)
        samestep.sum(1)
    """,
    )
    assert codes(ranks) == [1, 0, 0]
    assert "rank 0 at samestep.sum (train.py:" in ranks[0][2]
    assert "ranks 1, 2 at the end of the script" in ranks[0][2]


def test_a_rank_that_fails_leaves_at_once_and_the_others_are_told(script):
    began = time.monotonic()
    ranks = run(
        script,
        3,
        """
    if world.rank == 1:
        raise ValueError("mine")
    samestep.sum(1)
    """,
    )
    assert time.monotonic() - began < 25
    assert codes(ranks) == [1, 1, 1]
    assert ranks[1][2].rstrip().endswith("ValueError: mine")
    for rank in (0, 2):
        assert re.search(
            r"RankMissing: rank 1 \(.*\) was lost: .*, while this rank was in samestep.sum \(train.py:\d+\)",
            ranks[rank][2],
        )


def test_an_exception_in_the_block_of_the_first_does_not_leave_the_others_waiting(script):
    ranks = run(
        script,
        2,
        """
    with samestep.first():
        if world.rank == 0:
            raise OSError("no network")
        print("entered")
    """,
    )
    assert codes(ranks) == [1, 1]
    assert "OSError: no network" in ranks[0][2]
    assert "samestep.first" in ranks[1][2]
    assert ranks[1][1] == ""


@pytest.mark.parametrize(
    ("seed", "draws"),
    [("torch.default_generator.seed()", 1), ("torch.manual_seed(int(os.environ['RANK']))", 3)],
)
def test_from_init_on_ranks_draw_alike_where_the_script_has_not_seeded_them(script, seed, draws):
    begun = START.replace("    world =", f"    {seed}\n    world =")
    ranks = script.run(begun + "    print(torch.rand(1).item(), torch.randperm(9).tolist())", 3)
    assert len({out for _, out, _ in ranks}) == draws


def test_each_rank_ends_with_its_own_exit_code(script):
    assert codes(run(script, 3, "    sys.exit(3 if world.rank == 1 else 0)")) == [0, 3, 0]


@pytest.mark.slow
def test_a_rank_that_works_longer_than_the_others_finishes_its_work(script):
    for slow in (0, 1):
        ranks = run(
            script,
            2,
            f"""
    samestep.sum(1)
    if world.rank == {slow}:
        time.sleep(1.5)
        print("done")
    """,
        )
        assert codes(ranks) == [0, 0], ranks
        assert ranks[slow][1:] == ("done\n", "")


@pytest.mark.slow
def test_a_rank_that_leaves_the_loop_early_ends_those_that_go_on_in_it(script):
    ranks = run(
        script,
        2,
        """
    model = samestep.replicate(torch.nn.Linear(4, 2))
    for step in range(4):
        if world.rank == 0 and step == 1:
            break
        model(torch.ones(3, 4)).sum().backward()
    """,
    )
    assert codes(ranks) == [0, 1], ranks
    assert f"rank 0 ({os.uname().nodename}) left before, at the end of the script" in ranks[1][2]


FORGETFUL = """
    from torch.utils.data import TensorDataset
    model = samestep.replicate(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)))
    kept = [model]
    class Data(torch.utils.data.Dataset):
        __len__ = lambda self: 24
        __getitem__ = lambda self, index: torch.rand(4)
    loader = samestep.loader(Data(), 12, num_workers=1)
    for x in loader:
        model(x).sum().backward()
    stream = iter(loader)
    next(stream)
    import torch.distributed as dist
    pending = dist.all_reduce(torch.ones(10), async_op=True)
    print(os.getpid(), *(process.pid for process in __import__("psutil").Process().children(recursive=True)))
"""


@pytest.mark.slow
def test_a_script_that_forgets_everything_ends_well_and_leaves_no_process(script):
    ranks = script.run_interpreters(START + FORGETFUL, 2)
    assert codes(ranks) == [0, 0], ranks
    assert [error for _, _, error in ranks][1:] == [""]
    pids = [int(pid) for _, out, _ in ranks for pid in out.split()]
    assert len(pids) >= 4
    until = time.monotonic() + 5
    while any(map(psutil.pid_exists, pids)):
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.slow
def test_a_script_that_destroys_the_group_itself_ends_well(script):
    ranks = script.run_interpreters(
        START + "    samestep.sum(1)\n    torch.distributed.destroy_process_group()", 2
    )
    assert [(code, error) for code, _, error in ranks] == [(0, ""), (0, "")]


def test_a_group_of_the_script_that_is_not_of_all_ranks_is_refused(script):
    ranks = script.run(
        """
    import os
    import torch.distributed as dist
    dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/{os.environ['RANK']}", rank=0, world_size=1)
    import samestep
    try:
        samestep.init()
    except samestep.UsageError as error:
        print(str(error).partition(";")[0])
        os._exit(0)
    """,
        2,
    )
    said = "the script's init_process_group made this rank 0 of 1, but it is rank {} of 2\n"
    assert [out for _, out, _ in ranks] == [said.format(0), said.format(1)]


def test_a_group_that_the_script_made_is_adopted(script):
    ranks = script.run(
        """
    import torch.distributed as dist
    dist.init_process_group("gloo")
    import samestep
    world = samestep.init()
    print(world.rank, samestep.sum(1))
    try:
        samestep.sum(1) if world.rank == 0 else samestep.gather([1])
    except samestep.RanksDiffer as error:
        print("named")
    dist.destroy_process_group()
    """,
        2,
    )
    assert [(code, out, error) for code, out, error in ranks] == [
        (0, "0 2\nnamed\n", ""),
        (0, "1 2\nnamed\n", ""),
    ]
