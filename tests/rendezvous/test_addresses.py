import os
import socket
import subprocess
import sys

import pytest

from samestep.errors import PlacementError
from samestep.rendezvous import addresses


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a process an /etc/hosts of its own")
def test_a_name_that_leads_back_here_is_named_with_its_line(tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n127.0.1.1 node02 node02.site # as Debian writes it\n")
    ask = "from samestep.rendezvous.addresses import resolve\nresolve('node02')"
    inside = f'mount --bind {hosts} /etc/hosts && exec "$0" -c "$1"'
    words = ["unshare", "--mount", "sh", "-c", inside, sys.executable, ask]
    done = subprocess.run(words, capture_output=True, text=True)
    here = socket.gethostname()
    assert done.stderr.splitlines()[-1] == (
        f"samestep.errors.PlacementError: {here} resolves node02 to 127.0.1.1 (/etc/hosts line 2), which is "
        f"{here} itself; correct that, or set MASTER_ADDR to an address of node02"
    )


def test_a_name_that_does_not_resolve_is_said():
    with pytest.raises(PlacementError, match=r"cannot resolve no\.such\.invalid \(.+\); set MASTER_ADDR to"):
        addresses.resolve("no.such.invalid")
    with pytest.raises(
        PlacementError, match=r"cannot resolve nohost\.invalid \(.*SUFFIX is \.invalid\); corr"
    ):
        addresses.resolve("nohost", ".invalid")


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "10.1.2.3", "::1"])
def test_addresses_and_localhost_are_resolved_to_themselves(name):
    assert addresses.resolve(name) == [name]


def test_an_address_is_found_on_its_interface():
    assert addresses.interface_of(addresses.source_for("127.0.0.1")) in ("lo", "lo0")
    assert addresses.interface_of("203.0.113.1") is None


def test_places_where_nothing_listens_are_told_apart():
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.create_server(("127.0.0.1", 0)) as ended:
        places = [server.getsockname()[:2] for server in (listening, ended)]
        ended.close()
        assert addresses.unreachable(places) == places[1:]
