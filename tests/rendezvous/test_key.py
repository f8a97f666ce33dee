"""The key of a run: who gets it, and what is no key."""

import os
import re
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from samestep.errors import PlacementError
from samestep.rendezvous.channel import CLAIM, Channel
from samestep.rendezvous.key import DESCRIPTOR, derive, key_file, key_of_run, key_of_user


def state(tmp_path: Path) -> dict[str, str]:
    return {"XDG_STATE_HOME": str(tmp_path)}


def test_the_file_is_made_once_for_all_that_begin_together_and_only_its_user_reads_it(tmp_path):
    ask = "import os; from samestep.rendezvous.key import key_of_user; print(key_of_user(os.environ).hex())"
    with ThreadPoolExecutor(8) as pool:
        found = set(
            pool.map(
                lambda _: subprocess.check_output(
                    [sys.executable, "-c", ask], env={**os.environ, **state(tmp_path)}
                ),
                range(8),
            )
        )
    assert len(found) == 1
    path = tmp_path / "samestep" / "key"
    assert found == {path.read_bytes().hex().encode() + b"\n"}
    assert [stat.S_IMODE(entry.stat().st_mode) for entry in (path, path.parent)] == [0o600, 0o700]


@pytest.mark.parametrize("wrong", ["mode", "owner", "link", "pipe", "long"])
def test_a_file_that_may_be_another_users_is_refused(tmp_path, wrong):
    path = tmp_path / "samestep" / "key"
    key = key_of_user(state(tmp_path))
    if wrong == "mode":
        path.chmod(0o640)
    elif wrong == "owner":
        if os.geteuid():
            pytest.skip("only root can give a file away")
        os.chown(path, 65534, 65534)
    elif wrong == "link":
        path.rename(tmp_path / "other")
        path.symlink_to(tmp_path / "other")
    elif wrong == "pipe":
        path.unlink()
        os.mkfifo(path, 0o600)
    else:
        path.write_bytes(key + b"x")
    with pytest.raises(PlacementError, match=r"delete it|cannot be read") as raised:
        key_of_user(state(tmp_path))
    assert key.hex() not in str(raised.value)


@pytest.mark.parametrize("said", ["", "x" * 64, "ab" * 31, "ab" * 33])
def test_a_variable_that_is_no_key_is_refused_without_its_value(tmp_path, said):
    env = {**state(tmp_path), "SAMESTEP_KEY": said}
    if not said:
        assert key_of_user(env) == (tmp_path / "samestep" / "key").read_bytes()
        return
    with pytest.raises(
        PlacementError, match=f"^SAMESTEP_KEY has {len(said)} characters, which is not"
    ) as raised:
        key_of_user(env)
    assert said not in str(raised.value)


def test_a_worker_gets_the_key_of_its_launcher_and_no_descriptor_is_left_for_what_it_starts():
    key = bytes(range(32))
    ask = (
        "import os, subprocess, sys; from samestep.rendezvous.key import key_of_run; "
        "print(key_of_run(os.environ, 'samestep').hex()); sys.stdout.flush(); "
        "subprocess.run(['ls', '-l', '/proc/self/fd'], close_fds=False)"
    )
    with key_file(key, 2) as descriptor:
        env = {**os.environ, DESCRIPTOR: str(descriptor)}
        said = subprocess.check_output([sys.executable, "-c", ask], env=env, pass_fds=[descriptor], text=True)
    assert said.splitlines()[0] == key.hex()
    assert "samestep-key" not in said


@pytest.mark.parametrize("number", ["", "-1", "0", "987", "x", "9" * 30])
def test_a_descriptor_that_holds_no_key_is_refused(tmp_path, number):
    env = {**state(tmp_path), DESCRIPTOR: number}
    if not number:
        assert key_of_run(env, "samestep") == key_of_user(env)
        return
    with pytest.raises(
        PlacementError, match=f"^this process did not inherit the run's key that {DESCRIPTOR} names"
    ):
        key_of_run(env, "samestep")
    assert key_of_run(env, "slurm") == key_of_user(env)


def test_words_are_told_apart_wherever_they_are_cut():
    assert (
        len({derive(b"k" * 32, *words) for words in (("ab", "c"), ("a", "bc"), ("abc",), ("abc", ""))}) == 4
    )


@pytest.fixture
def pair() -> Iterator[Callable[..., list[socket.socket]]]:
    """Makes pairs of sockets, and closes them."""
    made = []

    def make() -> list[socket.socket]:
        made.extend(socket.socketpair())
        return made[-2:]

    yield make
    for opened in made:
        opened.close()


def linked(ends: list[socket.socket], host_key: bytes, comer_key: bytes) -> tuple[Channel, Channel]:
    return Channel(ends[0], host_key), Channel(ends[1], comer_key, CLAIM.pack(b"r" * 32, 1, 2))


def read(link: Channel) -> list[bytes]:
    link.fill()
    return link.taken()


def test_both_ends_prove_themselves_before_anything_is_said(pair):
    host, comer = linked(pair(), b"k" * 32, b"k" * 32)
    assert (read(host), read(comer), read(host)) == ([], [], [])
    assert (host.is_proven, comer.is_proven) == (True, True)
    comer.send_json({"a": 1})
    host.send(b"b")
    assert (host.wait_json(), read(comer)) == ({"a": 1}, [b"b"])


def test_another_key_is_noticed_by_the_first_message(pair):
    host, comer = linked(pair(), b"k" * 32, b"j" * 32)
    with pytest.raises(ValueError, match="another key"):
        read(host)
    host.close()
    with pytest.raises(EOFError):
        read(comer)


@pytest.mark.parametrize(
    "changed", [(b"s" * 32, 1, 2), (b"r" * 32, 2, 2), (b"r" * 32, 1, 3)], ids=["run", "number", "size"]
)
def test_a_proof_holds_for_one_run_one_number_and_one_size(pair, changed):
    (host_end, wire), (comer_end, tap) = pair(), pair()
    host, comer = linked([host_end, comer_end], b"k" * 32, b"k" * 32)
    wire.sendall(tap.recv(1 << 16)), read(host), tap.sendall(wire.recv(1 << 16)), read(comer)
    claim, proof = CLAIM.pack(b"r" * 32, 1, 2), tap.recv(1 << 16)
    assert proof.startswith(claim)
    wire.sendall(CLAIM.pack(*changed) + proof.removeprefix(claim))
    with pytest.raises(ValueError, match="another key"):
        read(host)
    assert not host.is_proven


@pytest.mark.parametrize("change", ["bit", "again", "number", "length"])
def test_a_changed_or_repeated_message_is_refused(pair, change):
    (host_end, wire), (comer_end, tap) = pair(), pair()
    host, comer = linked([host_end, comer_end], b"k" * 32, b"k" * 32)

    def carry(source: socket.socket, to: socket.socket) -> bytes:
        data = source.recv(1 << 16)
        to.sendall(data)
        return data

    carry(tap, wire), read(host), carry(wire, tap), read(comer), carry(tap, wire), read(host)
    assert (host.is_proven, comer.is_proven) == (True, True)
    comer.send(b"go on")
    message = carry(tap, wire)
    assert read(host) == [b"go on"]
    comer.send(b"go on")
    second = tap.recv(1 << 16)
    changed = {
        "bit": second[:-1] + bytes([second[-1] ^ 1]),
        "again": message,
        "number": second[:4] + message[4:20] + second[20:],
        "length": b"\xff\xff\xff\xff" + second[4:],
    }[change]
    wire.sendall(changed)
    with pytest.raises(
        ValueError, match=re.escape("a message without end" if change == "length" else "a changed")
    ):
        read(host)
