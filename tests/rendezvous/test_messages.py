"""What a member makes of single messages: in an odd order, at an odd moment, or such as no member sends."""

import json
import math
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from samestep.errors import RankMissing
from samestep.rendezvous import note
from samestep.rendezvous.channel import Channel
from samestep.rendezvous.join import join
from samestep.rendezvous.member import Member

KEY = bytes(range(32))


@pytest.fixture
def hosting() -> Iterator[tuple[subprocess.Popen[str], tuple[str, int]]]:
    """A host of three nodes as a process, which can be stopped, and where it listens."""
    work = "from samestep.rendezvous.host import *\nfrom samestep.rendezvous.listen import listen\n"
    work += f"KEY = {KEY!r}\nopened = listen([0], ['127.0.0.1'])\n"
    work += "print(opened[0].getsockname()[1], flush=True)\nhost(opened, Member('r', 0, 3, KEY, 'node', limit_s=20))"
    with subprocess.Popen([sys.executable, "-c", work], stdout=-1, stderr=-1, text=True) as process:
        yield process, ("127.0.0.1", int(process.stdout.readline()))
        process.kill()


HELLO = {
    "host": "node02",
    "pid": 1,
    "machine": "m",
    "script": "",
    "places": [],
    "facts": {},
}


def connected(
    stack: ExitStack, where: tuple[str, int], number: int, run: str = "r", size: int = 3
) -> Channel:
    """A connection whose two ends have shown each other that they have the key."""
    claim = Member(run, number, size, KEY).claim
    link = Channel(stack.enter_context(socket.create_connection(where)), KEY, claim)
    while not link.is_proven:
        link.fill()
    return link


def heard(link: Channel) -> list[dict[str, object]]:
    """What the other end says until it leaves."""
    messages = []
    with suppress(EOFError):
        while True:
            messages.append(link.wait_json())
    return messages


def answer(link: Channel, said: object = HELLO) -> dict[str, object]:
    link.send(json.dumps(said).encode())
    return link.wait_json()


def test_one_too_many_without_a_number_is_refused_where_all_come_at_once(hosting):
    process, where = hosting
    with ExitStack() as stack:
        lines = [connected(stack, where, -1) for _ in range(3)]
        # Another is answered, so these are in; what they say while the host is stopped it hears in one turn.
        assert answer(connected(stack, where, -1, "another")) == {"unknown": "r"}
        process.send_signal(signal.SIGSTOP)
        for line in lines:
            line.send_json(HELLO)
        process.send_signal(signal.SIGCONT)
        said = process.communicate(timeout=20)[1].splitlines()[-1]
        told = [str(heard(line)) for line in lines]
    assert said == (
        "samestep.errors.RanksDiffer: another node (node02) came, which is one too many for 3; "
        "start as many as are counted"
    )
    assert all("one too many for 3" in text for text in told)


def test_one_that_comes_again_in_the_moment_in_which_its_first_line_ends_is_let_in(hosting):
    process, where = hosting
    with ExitStack() as stack:
        before, again = (connected(stack, where, 1) for _ in range(2))
        assert answer(before)["welcome"] == 1
        assert answer(connected(stack, where, 1, "another")) == {"unknown": "r"}
        process.send_signal(signal.SIGSTOP)
        again.send_json(HELLO)
        before.close()
        process.send_signal(signal.SIGCONT)
        assert again.wait_json()["welcome"] == 1
        assert answer(connected(stack, where, 2))["welcome"] == 2
        assert (process.wait(20), process.stderr.read()) == (0, "")


NONSENSE = [
    [], 5, None, "x", {}, {"told": 7}, {"error": "\x1b[2J", "kind": "UsageError"},
    *(HELLO | wrong for wrong in (
        {"pid": math.inf}, {"pid": []}, {"facts": 7}, {"facts": [1]}, {"places": 7}, {"places": [7]},
        {"places": [["no such host", 1]]}, {"places": [["127.0.0.1", math.nan]]}, {"places": [[]]}, {"places": None})),
]  # fmt: skip


def test_nonsense_of_one_that_has_the_key_is_dropped_and_the_run_begins(hosting):
    process, where = hosting
    with ExitStack() as stack:
        for said in NONSENSE:
            line = connected(stack, where, 1)
            line.send(json.dumps(said).encode())
            assert heard(line) == [], said
        for raw in (b"", b"\xff", b"{", b"[" * 100_000, b"1" * 10_000):
            line = connected(stack, where, 1)
            line.send(raw)
            assert heard(line) == [], raw[:20]
        for said in ({}, {"told": 7}, HELLO):
            line = connected(stack, where, 1)
            assert answer(line)["welcome"] == 1
            line.send(json.dumps(said).encode())
            assert heard(line) == [], said
        lines = [connected(stack, where, number) for number in (1, 2)]
        assert [answer(line)["welcome"] for line in lines] == [1, 2]
        assert (process.wait(20), process.stderr.read()) == (0, "")


POSITION = {
    "path": [0], "parent_places": [], "children": [], "node": 0, "nodes": 1, "local_rank": 1, "local_size": 2,
    "sharing": {}, "address": "",
}  # fmt: skip
ANSWERS = [
    (5,), ({"welcome": "x", "host": "h"},), ({"welcome": math.inf, "host": "h"},), ({"welcome": 2, "host": "h"},),
    ({},),
    *(({"welcome": 1, "host": "h"}, {"complete": wrong}) for wrong in (
        7, {}, POSITION | {"path": []}, POSITION | {"path": 7}, POSITION | {"path": [math.inf]},
        POSITION | {"parent_places": [7]}, POSITION | {"children": [None]}, POSITION | {"sharing": 7})),
]  # fmt: skip


@pytest.mark.parametrize("said", ANSWERS, ids=str)
def test_nonsense_where_number_0_should_be_is_no_number_0(said):
    with socket.create_server(("127.0.0.1", 0)) as opened:

        def speak() -> None:
            while opened.fileno() >= 0:
                with suppress(OSError, EOFError), opened.accept()[0] as line:
                    link = Channel(line, KEY)
                    link.wait_json()
                    for message in said:
                        link.send(json.dumps(message).encode())

        thread = threading.Thread(target=speak, daemon=True)
        thread.start()
        with pytest.raises(RankMissing, match=r"^rank 1 of r found no rank 0 within 0.3 s \("):
            join(lambda: [opened.getsockname()], Member("r", 1, 2, KEY, limit_s=0.3))


@pytest.mark.parametrize("places", [
    7, {}, "x", [7], [[]], [["127.0.0.1"]], ["a\0b"], ["\x1b[2J/x"], ["/" + 300 * "x"], [["\0", 1]], [["x" * 300, 1]],
    [["127.0.0.1", 99999]], [["127.0.0.1", -1]], [["127.0.0.1", math.inf]], [["127.0.0.1", 10**30]], [["\ud800", 1]],
    ["\ud800/x"], [["127.0.0.1", "x"]], [[["127.0.0.1"], 1]], [["node\x1b[2J", 1]],
], ids=repr)  # fmt: skip
def test_a_hostile_note_ends_a_rank_in_a_sentence(tmp_path, places):
    path = tmp_path / "note"
    path.write_text(json.dumps({"places": places}))
    with pytest.raises(RankMissing, match=r"^rank 1 of r found no rank 0 within 0.3 s \(") as raised:
        join(lambda: note.read(path), Member("r", 1, 2, KEY, limit_s=0.3))
    assert str(raised.value).isprintable()
