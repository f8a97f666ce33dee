"""Real processes in a tree: rounds, a store, news, and what is heard of one that ends or leaves."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from samestep.rendezvous.listen import private_folder

BEGIN = """
    import json, os, sys, time
    from samestep.errors import SamestepError
    from samestep.placement.place import Placement
    from samestep.rendezvous.ranks import connect_ranks
    rank, size = map(int, sys.argv[1:3])
    os.environ["SAMESTEP_KEY"] = "ab" * 32
    told = {"node": "GROUP_RANK=0", "local_rank": "LOCAL_RANK=0", "local_size": "LOCAL_WORLD_SIZE=2"}
    here = Placement(rank, size, rank, size, 0, 1, "torchrun", "127.0.0.1", 1, told, run=os.getcwd())
    tree = connect_ranks(here, 20)
"""


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Callable[..., list["subprocess.Popen[str]"]]]:
    started: list[subprocess.Popen[str]] = []

    def start(source: str, size: int, begin: str = BEGIN) -> list["subprocess.Popen[str]"]:
        text = dedent(begin) + dedent(source)
        started.extend(
            subprocess.Popen(
                [sys.executable, "-c", text, str(rank), str(size)],
                cwd=tmp_path,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(size)
        )
        return started

    yield start
    for process in started:
        process.kill()
        process.communicate()


def said(started: list["subprocess.Popen[str]"]) -> list[str]:
    return [process.communicate(timeout=30)[0].strip() for process in started]


@pytest.mark.parametrize("size", [12, pytest.param(20, marks=pytest.mark.slow)])
def test_ranks_that_know_no_place_on_their_machine_are_arranged_by_rank_0(ranks, size):
    work = "print(len(tree.gather(None, 20)), len(tree._channels) < 6)\ntree.leave()"
    found = said(ranks(work, size, BEGIN.replace("told, run", "{}, run")))
    assert found == [f"{size} True"] * size


@pytest.mark.parametrize("size", [2, 3, 7])
def test_all_hear_what_each_brings(ranks, size):
    found = said(ranks("print(tree.gather(f'word {rank}', 20), tree.gather(None, 20))\ntree.leave()", size))
    assert found == [f"{[f'word {rank}' for rank in range(size)]} {[None] * size}"] * size


def test_no_process_waits_for_a_neighbour_that_waits_for_it(ranks):
    """More at once than sockets hold, up and down: as where Gloo of 100 ranks and more opens its connections."""
    work = """
        began = time.monotonic()
        for part in range(10):
            tree.change("set", f"{rank}.{part}", bytes(100_000))
        for other in range(size):
            assert tree.await_keys([f"{other}.{part}" for part in range(10)], 20)
        assert len(tree.gather("x" * 1_000_000, 20)) == size
        print(time.monotonic() - began < 20)
        tree.leave()
    """
    assert said(ranks(work, 6)) == ["True"] * 6


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_that_another_user_made_keeps_no_run_from_starting(ranks, tmp_path):
    """Its name may have been seen in an earlier run of the same name and port."""
    folders = [private_folder(b"\xab" * 32, str(tmp_path), "1", turn) for turn in "013"]
    for folder in folders:
        folder.mkdir()
        os.chown(folder, 65534, 65534)
    try:
        found = said(ranks("print(tree.gather(rank, 20))\ntree.leave()", 3))
    finally:
        for folder in folders:
            folder.rmdir()
    assert found == ["[0, 1, 2]"] * 3


def test_changes_of_the_store_are_the_same_everywhere_and_a_count_loses_none(ranks):
    work = """
    for turn in range(50):
        tree.change("add", "count", b"1")
        tree.change("set", f"{rank}/{turn}", b"x" * turn)
    first = tree.change("replace", "first", b"%d" % rank, b"")[1]
    assert tree.await_keys([f"{other}/49" for other in range(size)], 10)
    assert not tree.await_keys(["never"], 0.1)
    tree.gather(None, 20)
    print(tree.stored["count"], tree.stored["first"], len(tree.stored), first == tree.stored["first"])
    tree.gather(None, 20)
    print(*(tree.change("delete", f"{rank}/0")[0] is not None for _ in range(2)))
    tree.gather(None, 20)
    tree.leave()
    """
    found = said(ranks(work, 5))
    assert len(set(found)) == 1
    assert found[0].startswith("b'250' b'")
    assert found[0].splitlines()[0].endswith(" 252 True")
    assert found[0].splitlines()[1] == "True False"


@pytest.mark.parametrize("lost", [0, *(pytest.param(lost, marks=pytest.mark.slow) for lost in (1, 2, 4)), 6])
def test_one_that_is_killed_is_heard_of_by_all_within_a_second(ranks, lost):
    work = """
    tree.gather(None, 20)
    print("up", flush=True)
    if rank == LOST:
        time.sleep(30)
    try:
        tree.gather(None, 20)
    except SamestepError as error:
        print(error)
    """
    started = ranks(work.replace("LOST", str(lost)), 7)
    for process in started:
        assert process.stdout.readline() == "up\n"
    time.sleep(0.2)
    began = time.monotonic()
    os.kill(started[lost].pid, signal.SIGKILL)
    rest = [process.communicate(timeout=30)[0] for rank, process in enumerate(started) if rank != lost]
    assert time.monotonic() - began < 5
    assert all(f"rank {lost}" in text and "was lost: its process has ended" in text for text in rest), rest


def test_one_that_left_is_named_to_those_that_go_on(ranks):
    work = """
    tree.gather(None, 20)
    if rank == 1:
        tree.leave("the end")
        sys.exit()
    time.sleep(0.5)
    try:
        tree.gather(None, 20)
    except SamestepError as error:
        print(error, tree.left)
    """
    found = said(ranks(work, 4))
    assert found[1] == ""
    assert all(
        "rank 1" in text and "left before, at the end {1: (1, 'the end')}" in text
        for text in (found[0], *found[2:])
    ), found


def test_news_reach_everyone_else_once(ranks):
    work = """
    tree.gather(None, 20)
    if rank == 3:
        tree.tell({"a": 1})
    until, news = time.monotonic() + 10, []
    while rank != 3 and not news and time.monotonic() < until:
        time.sleep(0.01)
        news = tree.take_news()
    tree.gather(None, 20)
    print(news, tree.take_news())
    tree.leave()
    """
    found = said(ranks(work, 5))
    assert found == [f"{[] if rank == 3 else [(3, {'a': 1})]} []" for rank in range(5)]


def test_a_forked_child_keeps_no_connection_open(ranks, tmp_path):
    """A loader's worker that outlives its rank would otherwise hide the rank's end."""
    work = """
    tree.gather(None, 20)
    if rank == 1:
        child = os.fork()
        if child == 0:
            os.close(1), os.close(2)
            time.sleep(20)
            os._exit(0)
        open("child", "w").write(str(child))
        os._exit(9)
    try:
        tree.gather(None, 20)
    except SamestepError as error:
        print(error)
    """
    began = time.monotonic()
    found = said(ranks(work, 3))
    took = time.monotonic() - began
    os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
    assert took < 15
    assert "rank 1" in found[0]
    assert "rank 1" in found[2]


def test_too_few_open_files_are_said_with_the_numbers_and_a_low_soft_limit_is_raised():
    ask = """
    import resource
    from samestep.rendezvous.listen import allow_descriptors
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 300))
    allow_descriptors(150, "150 ranks connect")
    print(resource.getrlimit(resource.RLIMIT_NOFILE))
    allow_descriptors(400, "400 ranks connect")
    """
    done = subprocess.run([sys.executable, "-c", dedent(ask)], capture_output=True, text=True)
    assert done.stdout == "(278, 300)\n"
    assert done.stderr.splitlines()[-1] == (
        "samestep.errors.UsageError: 400 ranks connect, which takes about 432 open files, and this process may have "
        "300 (`ulimit -Hn`); raise that limit, or start fewer processes"
    )


@pytest.mark.slow
def test_all_that_wait_name_the_same_ranks_and_so_does_one_that_comes_too_late(ranks):
    work = """
    tree.gather(None, 20)
    time.sleep({2: 1.5, 5: 20}.get(rank, 0))
    try:
        tree.gather(None, 0.5)
    except SamestepError as error:
        print(type(error).__name__, error.ranks, flush=True)
        time.sleep(3)  # a rank that ends is another reason
    """
    started = ranks(work, 7)
    found = [process.communicate(timeout=30)[0].strip() for rank, process in enumerate(started) if rank != 5]
    assert found == ["Late (2, 5)"] * 6


def test_what_is_told_before_a_round_is_there_after_it(ranks):
    work = """
    heard = set()
    for turn in range(200):
        tree.tell(turn)
        tree.gather(None, 20)
        heard |= set(tree.take_news())
        assert {(other, turn) for other in range(size) if other != rank} <= heard
    print("all")
    tree.leave()
    """
    assert said(ranks(work, 5)) == ["all"] * 5


@pytest.mark.parametrize("body", [
    b"r\0\0\0\1\xff", b"r\0\0\0\1[5]", b'n["left",2,"x","train.py:5"]', b'n["told"]',
    b'c[2,1,"add","key","zz",""]', b"x",
], ids=repr)  # fmt: skip
def test_one_that_has_the_key_and_sends_what_is_no_message_is_named_to_all(ranks, body):
    work = f"""
    if rank == 4:
        tree._send([tree._parent], {body!r})
        time.sleep(60)
    try:
        tree.gather(None, 20)
    except SamestepError as error:
        print(type(error).__name__, error)
    os._exit(0)
    """
    found = said(ranks(work, 5)[:4])
    assert all(
        re.fullmatch(r"RankMissing rank 4 .*was lost: it sends what is no message", text) for text in found
    )


def test_what_a_launcher_of_another_version_says_of_its_end_ends_in_a_sentence(ranks):
    work = """
    from functools import partial
    from samestep.rendezvous.channel import as_kind
    from samestep.start.nodes import End, _news_from
    mine = End(1, None, None, None, False, 0.5)
    tree.tell([1, "too", "short"] if rank == 1 else mine)
    try:
        print(tree.gather([*mine[:5], "late", *mine[6:]] if rank == 1 else mine, 20, partial(as_kind, End)))
    except SamestepError as error:
        print(error)
    news = tree.take_news(_news_from)
    print(news, tree.lost)
    os._exit(0)
    """
    found = [text.splitlines() for text in said(ranks(work, 3))]
    lost = r"rank 1( \(.+\))? was lost: it sends what is no message"  # which host, the one that found it may not know
    for of_gather, of_news in (found[0], found[2]):
        assert re.fullmatch(lost, of_gather)
        assert re.fullmatch(r"\[\] " + lost, of_news)


def test_a_line_is_one_write_also_where_python_is_unbuffered():
    read, write = os.pipe2(os.O_DIRECT)  # each read gives what one write has written
    source = "from samestep.rendezvous.member import say; say('word')"
    subprocess.run([sys.executable, "-u", "-c", source], stderr=write, check=True)
    assert os.read(read, 100) == b"samestep: word\n"
    os.close(read)
    os.close(write)
