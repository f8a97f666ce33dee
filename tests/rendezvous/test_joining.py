"""Real processes and sockets that come together, too late, twice, or from another run."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from samestep.errors import PlacementError, RankMissing, RanksDiffer
from samestep.rendezvous import note
from samestep.rendezvous.host import host
from samestep.rendezvous.join import join
from samestep.rendezvous.listen import listen
from samestep.rendezvous.member import Member
from samestep.rendezvous.tree import Tree

KEY = bytes(range(32))


def start(work: Callable[[], Tree]) -> Future[Tree]:
    pool = ThreadPoolExecutor(1)
    future = pool.submit(work)
    pool.shutdown(wait=False)
    return future


def listening() -> tuple[list[socket.socket], list[tuple[str, int]]]:
    opened = listen([0], ["127.0.0.1"])
    return opened, [opened[0].getsockname()]


def gathered(peers: Tree, word: str) -> list[str]:
    return peers.gather(word, 20)


@pytest.mark.parametrize("size", [2, 3])
def test_all_hear_what_each_brings_by_number(size):
    opened, where = listening()
    coming = [start(lambda n=n: join(lambda: where, Member("r", n, size, KEY))) for n in range(1, size)]
    groups = [host(opened, Member("r", 0, size, KEY)), *(future.result(20) for future in coming)]
    rest = [start(lambda c=c, n=n: gathered(c, f"word {n}")) for n, c in enumerate(groups) if n]
    assert gathered(groups[0], "word 0") == [f"word {n}" for n in range(size)]
    assert [future.result(20) for future in rest] == [[f"word {n}" for n in range(size)]] * (size - 1)
    assert groups[0].names == dict.fromkeys(range(size), socket.gethostname())
    for peers in groups:
        peers.leave()


def test_a_member_of_another_run_is_told_whom_it_found_and_keeps_nobody_from_coming():
    opened, where = listening()
    hosting = start(lambda: host(opened, Member("job 124.0", 0, 2, KEY)))
    with pytest.raises(RankMissing) as raised:
        join(lambda: where, Member("job 123.0", 1, 2, KEY, limit_s=0.3))
    assert str(raised.value) == (
        f"rank 1 of job 123.0 found no rank 0 within 0.3 s (127.0.0.1:{where[0][1]}: found job 124.0 there); "
        f"is rank 0 started, and can {socket.gethostname()} reach it?"
    )
    join(lambda: where, Member("job 124.0", 1, 2, KEY)).leave()
    hosting.result(20).leave()


@pytest.mark.slow
def test_something_else_at_the_port_is_passed_over():
    opened, where = listening()
    with socket.create_server(("127.0.0.1", 0)) as other:
        silent = [("127.0.0.1", other.getsockname()[1])]
        hosting = start(lambda: host(opened, Member("r", 0, 2, KEY)))
        began = time.monotonic()
        join(lambda: silent + where, Member("r", 1, 2, KEY)).leave()
        assert time.monotonic() - began < 10
        hosting.result(20).leave()


def test_a_taken_port_is_left_to_whoever_has_it():
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        (opened,) = listen([taken, 0], ["127.0.0.1"])
        with opened:
            assert opened.getsockname()[1] != taken


def test_who_is_missing_is_said_by_host_and_ends_at_the_limit(capsys, monkeypatch):
    monkeypatch.setattr("samestep.rendezvous.member.SAY_S", 0.2)
    opened, where = listening()
    present = start(lambda: join(lambda: where, Member("r", 1, 3, KEY, limit_s=5)))
    with pytest.raises(RankMissing, match=r"^rank 2 \(node02\) did not come within 1 s$") as raised:
        host(opened, Member("r", 0, 3, KEY, limit_s=1, expected=["node01", "node01", "node02"]))
    with pytest.raises(RankMissing, match=r"^rank 2 \(node02\) did not come within 1 s$") as heard:
        present.result(20)
    assert raised.value.ranks == heard.value.ranks == (2,)
    assert "samestep: waiting for rank 2 (node02); " in capsys.readouterr().err


def test_a_rank_that_comes_twice_is_named_with_both_its_places():
    opened, where = listening()
    hosting = start(lambda: host(opened, Member("r", 0, 3, KEY)))
    first = start(lambda: join(lambda: where, Member("r", 1, 3, KEY)))
    twin = f"from samestep.rendezvous.join import Member, join\nKEY = {KEY!r}\n"
    twin += f"join(lambda: {where!r}, Member('r', 1, 3, KEY, limit_s=20))"
    time.sleep(0.5)
    done = subprocess.run([sys.executable, "-c", twin], capture_output=True, text=True, timeout=30)
    for future in (hosting, first):
        with pytest.raises((RanksDiffer, RankMissing), match="rank 1 came twice: process"):
            future.result(20)
    assert "rank 1 came twice: process" in done.stderr


def test_ranks_that_count_differently_are_refused():
    opened, where = listening()
    hosting = start(lambda: host(opened, Member("r", 0, 3, KEY)))
    with pytest.raises(RanksDiffer, match=r"counts 3 ranks and rank 1 .* counts 4"):
        join(lambda: where, Member("r", 1, 4, KEY, limit_s=5))
    with pytest.raises(RanksDiffer, match="counts 4"):
        hosting.result(20)


def test_members_that_run_two_scripts_are_refused_whatever_their_numbers():
    opened, where = listening()
    hosting = start(lambda: host(opened, Member("r", 0, 3, KEY, "node", script="a.py")))
    unsaid = start(lambda: join(lambda: where, Member("r", 2, 3, KEY, "node")))
    time.sleep(0.5)
    assert [hosting.done(), unsaid.done()] == [False, False]
    says = (
        r"^node 0 \(.*\) runs 'a\.py' and another node \(.*\) runs 'b\\n.*; run one script on all nodes, or"
    )
    with pytest.raises(RanksDiffer, match=says) as raised:
        join(lambda: where, Member("r", -1, 3, KEY, "node", limit_s=5, script="b\n" + 1000 * "b"))
    assert len(str(raised.value)) < 500
    for future in (hosting, unsaid):
        with pytest.raises(RanksDiffer, match=says):
            future.result(20)


def test_one_that_left_before_all_were_there_may_come_again():
    opened, where = listening()
    hosting = start(lambda: host(opened, Member("r", 0, 3, KEY, noun="node")))
    early = "from samestep.rendezvous.join import *\n"
    early += f"KEY = {KEY!r}\njoin(lambda: {where!r}, Member('r', 1, 3, KEY, noun='node'))"
    with subprocess.Popen([sys.executable, "-c", early]) as process:
        time.sleep(1)
        process.kill()
    again = [start(lambda n=n: join(lambda: where, Member("r", n, 3, KEY, noun="node"))) for n in (1, 2)]
    for future in (hosting, *again):
        future.result(20).leave()


def test_a_member_without_a_number_gets_a_free_one():
    opened, where = listening()
    coming = [start(lambda n=n: join(lambda: where, Member("r", n, 3, KEY))) for n in (-1, 2)]
    peers = host(opened, Member("r", 0, 3, KEY))
    assert [future.result(20).number for future in coming] == [1, 2]
    for group in (peers, *(future.result() for future in coming)):
        group.leave()


def test_a_lost_member_is_named_to_all():
    opened, where = listening()
    coming = [start(lambda n=n: join(lambda: where, Member("r", n, 3, KEY))) for n in (1, 2)]
    peers = host(opened, Member("r", 0, 3, KEY))
    first, second = (future.result(20) for future in coming)
    for channel in first._channels.values():
        channel.connection.shutdown(socket.SHUT_RDWR)
    told = start(lambda: gathered(second, "here"))
    with pytest.raises(RankMissing, match=r"^rank 1 \(.*\) was lost: its process has ended or"):
        gathered(peers, "here")
    with pytest.raises(RankMissing, match=r"^rank 1 \(.*\) was lost: its process has ended or"):
        told.result(20)
    peers.leave()
    second.leave()


def test_news_of_one_reach_all_others():
    opened, where = listening()
    coming = [start(lambda n=n: join(lambda: where, Member("r", n, 3, KEY))) for n in (1, 2)]
    peers = host(opened, Member("r", 0, 3, KEY))
    first, second = (future.result(20) for future in coming)
    first.tell({"failed": 1})
    for group in (peers, second):
        until = time.monotonic() + 10
        while not (news := group.take_news()) and time.monotonic() < until:
            time.sleep(0.01)
        assert news == [(1, {"failed": 1})]
    assert first.take_news() == []
    for group in (first, peers, second):
        group.leave()


def test_a_note_that_a_crash_left_is_replaced(tmp_path):
    path = tmp_path / "note"
    with socket.create_server(("127.0.0.1", 0)) as gone:
        path.write_text(json.dumps({"places": [["127.0.0.1", gone.getsockname()[1]]]}))
    coming = start(lambda: join(lambda: note.read(path), Member("r", 1, 2, KEY)))
    time.sleep(0.3)
    opened = listen([0], ["127.0.0.1"])
    me = Member("r", 0, 2, KEY)
    with note.posted(path, opened, me):
        peers = host(opened, me)
    assert not path.exists()
    for group in (peers, coming.result(20)):
        group.leave()


def test_a_second_node_0_at_a_note_is_refused_and_both_hear_why(tmp_path):
    path = tmp_path / "note"
    first = start(lambda: note.meet(path, Member("r", 0, 2, KEY, "node", limit_s=20)))
    while not note.read(path):
        time.sleep(0.05)
    twin = f"from samestep.rendezvous.note import *\nKEY = {KEY!r}\n"
    twin += f"meet(Path({str(path)!r}), Member('r', 0, 2, KEY, 'node', limit_s=20))"
    done = subprocess.run([sys.executable, "-c", twin], capture_output=True, text=True, timeout=30)
    says = (
        rf"node 0 came twice: process {os.getpid()} on .* and process \d+ on .*; give every node a number of"
    )
    assert re.search(says, done.stderr)
    with pytest.raises(RanksDiffer, match=says):
        first.result(20)
    assert not path.exists()


def test_of_two_nodes_0_that_begin_together_neither_waits_for_node_1(tmp_path):
    path = tmp_path / "note"
    both = [start(lambda: note.meet(path, Member("r", 0, 2, KEY, "node", limit_s=20))) for _ in range(2)]
    for future in both:
        with pytest.raises(RanksDiffer, match="node 0 came twice"):
            future.result(20)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/net/unix")
def test_a_rank_whose_run_has_begun_without_it_hears_which_process_has_its_number(tmp_path):
    rank = "import sys\nfrom samestep.placement.place import Placement\n"
    rank += "from samestep.rendezvous.ranks import connect_ranks\n"
    rank += (
        "here = Placement(int(sys.argv[1]), 2, 0, 1, 0, 1, 'by hand', '127.0.0.1', 29_500, run=sys.argv[2])\n"
    )
    rank += "tree = connect_ranks(here, float(sys.argv[3]))\nprint('begun', flush=True)\nsys.stdin.read()"

    def started(number: int, limit_s: float) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", rank, str(number), str(tmp_path), str(limit_s)]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    begun = [started(number, 20) for number in (0, 1)]
    assert [process.stdout.readline() for process in begun] == ["begun\n"] * 2
    *_, said = started(1, 0.2).communicate(timeout=20)
    assert f"(process {begun[1].pid} is rank 1 of {tmp_path}, and its run has begun; " in said
    for process in begun:
        process.communicate(timeout=20)
    *_, said = started(1, 0.2).communicate(timeout=20)
    assert "found no rank 0 within" in said
    assert "has begun" not in said


def test_ranks_of_two_scripts_at_one_port_are_refused_where_their_runs_have_no_names(tmp_path):
    rank = """
from samestep.placement.place import this_process
from samestep.rendezvous.ranks import connect_ranks
connect_ranks(this_process(), 20)
"""
    with socket.create_server(("127.0.0.1", 0)) as free:
        meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    processes = []
    for number, name in enumerate(("train.py", "other.py")):
        (tmp_path / name).write_text(rank)
        env = {**os.environ, **meeting, "RANK": str(number)}
        command = [sys.executable, str(tmp_path / name)]
        processes.append(subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True))
    for process in processes:
        *_, said = process.communicate(timeout=30)
        assert re.search(
            r"rank 0 \(.*\) runs 'train\.py' and rank 1 \(.*\) runs 'other\.py'; run one script", said
        )


@pytest.mark.parametrize("kind", ["pipe", "link", "bomb", "list"])
def test_a_note_that_is_none_is_passed_over(tmp_path, kind):
    path = tmp_path / "note"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to("/dev/zero")
    else:
        path.write_text({"bomb": "[" * 100_000, "list": '{"places": [1, [], {}, null]}'}[kind])
    assert note.read(path) == []


def test_a_note_that_never_comes_ends_in_advice_where_all_were_started_together(tmp_path: Path):
    told = Member("r", 1, 2, KEY, advice="set MASTER_ADDR", no_place_s=0.3)
    with pytest.raises(PlacementError, match=r"^set MASTER_ADDR$"):
        join(lambda: note.read(tmp_path / "note"), told)


def test_a_rank_of_mpirun_does_not_wait_for_a_note_longer_than_its_limit(tmp_path: Path):
    rank = "import sys\nfrom samestep.rendezvous.ranks import connect_ranks\n"
    rank += "from samestep.placement.place import this_process\n"
    rank += "connect_ranks(this_process(), 0.5)"
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "OMPI", "PMI"))}
    env |= {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    env |= {
        "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
        "PMIX_NAMESPACE": "prterun-1",
        "SAMESTEP_RUN_DIR": str(tmp_path),
    }
    done = subprocess.run([sys.executable, "-c", rank], env=env, capture_output=True, text=True, timeout=30)
    assert "there is no note of it at" in done.stderr
    assert done.stderr.endswith("or SAMESTEP_RUN_DIR to a directory that all nodes share\n")
