"""The port of rank 0 is held from the launcher's choice until rank 0 listens on it."""

import json
import socket
import subprocess
import sys

import pytest

from samestep.rendezvous.listen import hold_port

STORES = """
import sys
from datetime import timedelta
from torch.distributed import TCPStore
for number, port in enumerate(map(int, sys.argv[1:])):
    libuv = number % 2 == 0
    limit = timedelta(seconds=50)
    server = TCPStore("127.0.0.1", port, 2, True, limit, wait_for_workers=False, use_libuv=libuv)
    client = TCPStore("localhost", port, 2, False, limit, use_libuv=libuv)
    client.set("key", "value")
    assert server.get("key") == b"value"
"""


@pytest.mark.slow
def test_torchs_store_listens_on_a_held_port_with_and_without_libuv():
    held = [hold_port() for _ in range(4)]
    try:
        ports = [str(port) for _, port in held]
        subprocess.run([sys.executable, "-c", STORES, *ports], check=True)
    finally:
        for opened, _ in held:
            opened.close()


def test_nobody_is_given_a_held_port_by_chance():
    held = [hold_port() for _ in range(50)]
    ports = {port for _, port in held}
    assert len(ports) == 50
    for reuse in (0, 1):
        for _ in range(2000):
            with socket.socket() as other:
                other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
                other.bind(("", 0))
                assert other.getsockname()[1] not in ports
    for opened, _ in held:
        opened.close()


@pytest.mark.slow
def test_runs_that_start_together_never_share_a_port(launcher):
    launcher.write(
        """
        import json, os, socket, time
        port = int(os.environ["MASTER_PORT"])
        mine = socket.socket()
        mine.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        mine.bind(("", port))
        mine.listen()
        with open("ports", "a") as file:
            file.write(json.dumps(port) + "\\n")
        while len(open("ports").readlines()) < 12:
            time.sleep(0.02)
        """
    )
    runs = [launcher.start("-n", "1", "train.py") for _ in range(12)]
    assert {run.finish()[0] for run in runs} == {0}
    assert len({json.loads(line) for line in (launcher.home / "ports").read_text().splitlines()}) == 12
