"""Other users and floods where the ranks of a machine meet."""

import os
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress

import pytest

from samestep.rendezvous.host import host
from samestep.rendezvous.join import join
from samestep.rendezvous.listen import listen, private_folder, private_socket
from samestep.rendezvous.member import Member

PRECIOUS = "what was there before"
KEY = bytes(range(32))
AS_ROOT = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user"),
]

# Other users while ranks meet

OTHER_USER = """
import os, socket, sys
path = sys.argv[1]
os.setgroups([]), os.setgid(65534), os.setuid(65534)
def tried(name, act):
    try:
        act()
    except OSError:
        print(name, "refused")
    else:
        print(name, "got in")
tried("connect", lambda: socket.socket(socket.AF_UNIX).connect(path))
tried("listen in its place", lambda: socket.socket(socket.AF_UNIX).bind(path))
tried("listen beside it", lambda: socket.socket(socket.AF_UNIX).bind(os.path.dirname(path) + "/0-1"))
tried("remove it", lambda: os.unlink(path))
tried("rename it", lambda: os.rename(path, path + "x"))
tried("list the directory", lambda: os.listdir(os.path.dirname(path)))
tried("remove the directory", lambda: os.rmdir(os.path.dirname(path)))
tried("rename the directory", lambda: os.rename(os.path.dirname(path), os.path.dirname(path) + "x"))
tried("open the directory to all", lambda: os.chmod(os.path.dirname(path), 0o777))
tried("link into the directory", lambda: os.symlink("/etc/passwd", os.path.dirname(path) + "/x"))
"""


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
@pytest.mark.parametrize("place", ["0-0", "0-1", "0-4"])
def test_another_user_reaches_no_socket_at_which_ranks_of_a_machine_meet(attempt, place):
    path = private_folder(os.urandom(32)) / place
    with private_socket(path):
        words = [shutil.which("python3"), "-I", "-c", OTHER_USER, path]
        done = subprocess.run(words, capture_output=True, text=True, cwd="/")
        assert done.returncode == 0, done.stderr
        assert len(done.stdout.splitlines()) == OTHER_USER.count("\ntried(")
        for line in done.stdout.splitlines():
            attempt(f"{place}: {line}")
            assert line.endswith("refused"), line
    assert not path.parent.exists()


IMPOSTOR = """
import os, socket, sys, time
folder, kind = sys.argv[1:]
os.setgroups([]), os.setgid(65534), os.setuid(65534)
os.mkdir(folder, 0o777)
os.chmod(folder, 0o777)
for name in ("0-0", "0-1", "0-2"):
    line = socket.socket(socket.AF_UNIX)
    line.bind(f"{folder}/{name}")
    os.chmod(f"{folder}/{name}", 0o777)
    line.listen(50)
    globals()["kept" + name] = line
print("ready", flush=True)
time.sleep(30)
"""
RANK = """
import sys
from samestep.placement.place import Placement
from samestep.rendezvous.ranks import connect_ranks
rank, size = int(sys.argv[1]), int(sys.argv[2])
told = {"node": "GROUP_RANK=0", "local_rank": "LOCAL_RANK=0", "local_size": "LOCAL_WORLD_SIZE=1"}
here = Placement(rank, size, rank, size, 0, 1, "torchrun", "127.0.0.1", int(sys.argv[3]), told, run="squatted")
tree = connect_ranks(here, 20)
print(tree.gather(rank, 20))
tree.leave()
"""


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
@pytest.mark.parametrize("turns", [1, 3])
def test_sockets_of_another_user_in_our_place_do_not_even_slow_a_start(attempt, turns):
    attempt(f"{turns} directories of known names with sockets that stay silent")
    port = "23456"
    folders = [private_folder(KEY, "squatted", port, str(turn)) for turn in range(turns)]
    with ExitStack() as stack:
        for folder in folders:
            words = [shutil.which("python3"), "-I", "-c", IMPOSTOR, folder, "silent"]
            squatter = stack.enter_context(
                subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd="/")
            )
            stack.callback(shutil.rmtree, folder)
            stack.callback(squatter.kill)
            assert squatter.stdout.readline() == "ready\n"
        env = {**os.environ, "SAMESTEP_KEY": KEY.hex()}
        began = time.monotonic()
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", RANK, str(rank), "4", port], env=env, stdout=-1, text=True
            )
            for rank in range(4)
        ]
        assert [rank.communicate(timeout=30)[0] for rank in ranks] == ["[0, 1, 2, 3]\n"] * 4
        assert time.monotonic() - began < 15


@pytest.mark.parametrize("kind", ["silent", "babbling"])
def test_a_flood_from_400_addresses_keeps_nobody_out(attempt, kind):
    attempt(f"{kind} connections from 400 addresses at once")
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    (opened,) = listen([0], ["127.0.0.1"])
    place, found, ended = opened.getsockname(), [], threading.Event()

    def flood():
        kept = []
        while not ended.is_set():
            for number in range(400):
                line = socket.socket()
                kept.append(line)
                with suppress(OSError):
                    line.settimeout(0.2)
                    line.bind((f"127.1.{number // 200}.{number % 200 + 1}", 0))
                    line.connect(place)
                    if kind == "babbling":
                        line.send(b"samestep-1\n" + os.urandom(64))
            for line in kept[:-400]:
                line.close()
            del kept[:-400]
        for line in kept:
            line.close()

    hosting = threading.Thread(
        target=lambda: found.append(host([opened], Member("r", 0, 4, KEY, limit_s=40)))
    )
    flooding = threading.Thread(target=flood)
    flooding.start()
    hosting.start()
    time.sleep(0.5)
    began = time.monotonic()
    coming = []
    joins = [
        threading.Thread(
            target=lambda n=n: coming.append(join(lambda: [place], Member("r", n, 4, KEY, limit_s=40)))
        )
        for n in (1, 2, 3)
    ]
    try:
        for thread in joins:
            thread.start()
        for thread in (*joins, hosting):
            thread.join(40)
    finally:
        ended.set()
        flooding.join(20)
    assert len(found) == 1
    assert len(coming) == 3
    assert time.monotonic() - began < 30
    for tree in (*found, *coming):
        tree.leave()
