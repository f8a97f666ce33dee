"""A stranger at every port and file of a starting, running and ending run: another user, or another network."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from textwrap import dedent

import psutil
import pytest

from samestep.errors import RankMissing
from samestep.rendezvous.host import host
from samestep.rendezvous.join import join
from samestep.rendezvous.key import derive
from samestep.rendezvous.listen import listen
from samestep.rendezvous.member import Member

pytestmark = [
    pytest.mark.timeout(170),
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user"),
]

NOBODY, GREETING = "65534", 64
STRANGERS = Path(__file__).with_name("strangers.py")
TRAIN = """
    import hashlib, os, time
    import torch, samestep
    world = samestep.init()
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(24, 8), torch.arange(24) % 2)
    train = samestep.steps(data, batch_size=8, microbatch=2, shuffle=True)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 2))
    model = samestep.replicate(net, exact=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    def reach(name):
        open(f"{name}-{world.rank}", "w").close()
        while os.environ.get("WAITS") and not os.path.exists(f"go-{name}"):
            time.sleep(0.01)
    for number, step in enumerate(train):
        for x, y in step:
            torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if number == 1:
            reach("during")
        total = samestep.sum(number)
    reach("end")
    if world.rank == 0:
        state = b"".join(tensor.detach().numpy().tobytes() for tensor in model.state_dict().values())
        print("bits", hashlib.sha256(state).hexdigest(), flush=True)
"""


def free_port(address: str = "127.0.0.1") -> int:
    with socket.create_server((address, 0)) as free:
        return int(free.getsockname()[1])


class Run:
    """A run of two launchers that meet at a port, or of one, which waits where a file says so."""

    def __init__(self, home: Path, stack: ExitStack) -> None:
        self.home, self._stack = home, stack
        self.processes: list[subprocess.Popen[str]] = []
        (home / "train.py").write_text(dedent(TRAIN))

    def start(self, *words: str, waits: bool = True) -> None:
        clean = {
            name: value for name, value in os.environ.items() if not name.startswith(("SAMESTEP", "OMP"))
        }
        env = clean | ({"WAITS": "1"} if waits else {})
        command = [sys.executable, "-m", "samestep", "run", *words, "train.py"]
        process = subprocess.Popen(
            command, cwd=self.home, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self._stack.callback(process.kill)
        self.processes.append(process)

    def wait_for(self, name: str, count: int = 2) -> None:
        until = time.monotonic() + 120
        while len(list(self.home.glob(f"{name}-[0-9]"))) < count:
            assert time.monotonic() < until, [process.poll() for process in self.processes]
            time.sleep(0.01)

    def go(self, name: str) -> None:
        (self.home / f"go-{name}").touch()

    def ports(self) -> list[int]:
        """All at which a process of this run listens."""
        family = [member for process in self.processes for member in _family(process.pid)]
        return sorted(
            {
                line.laddr.port
                for member in family
                for line in member.net_connections()
                if line.status == "LISTEN"
            }
        )

    def bits(self) -> str:
        ends = [process.communicate(timeout=140) for process in self.processes]
        assert [process.returncode for process in self.processes] == [0] * len(ends), ends
        assert not [text for _, text in ends if "\x1b" in text or "Traceback" in text], ends
        found = re.findall("^bits ([0-9a-f]{64})$", "".join(out for out, _ in ends), re.MULTILINE)
        assert len(found) == 1, ends
        return str(found[0])


def _family(pid: int) -> list[psutil.Process]:
    parent = psutil.Process(pid)
    return [parent, *parent.children(recursive=True)]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[[], Run]]:
    with ExitStack() as stack:
        homes = iter(range(9))

        def make() -> Run:
            home = tmp_path / f"home-{next(homes)}"
            home.mkdir()
            return Run(home, stack)

        yield make


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    with ExitStack() as stack:
        alone = Run(tmp_path_factory.mktemp("undisturbed"), stack)
        alone.start("--fork", "-n", "2", waits=False)
        return alone.bits()


class Network:
    """The other user on this machine, or on another that a wire leads to."""

    def __init__(self, kind: str, stack: ExitStack) -> None:
        self.address, self._enter = "127.0.0.1", []
        if kind == "another network":
            name = f"ssa{os.getpid()}"
            subprocess.run(["ip", "netns", "add", name], check=True)
            stack.callback(subprocess.run, ["ip", "netns", "del", name], check=True)
            peer = ("type", "veth", "peer", "name", "eth0", "netns", name)
            subprocess.run(["ip", "link", "add", name, *peer], check=True)
            subprocess.run(["ip", "address", "add", "10.97.0.1/24", "dev", name], check=True)
            subprocess.run(["ip", "link", "set", name, "up"], check=True)
            self._enter = ["ip", "netns", "exec", name]
            for words in (["address", "add", "10.97.0.2/24", "dev", "eth0"], ["link", "set", "eth0", "up"]):
                subprocess.run([*self._enter, "ip", *words], check=True)
            self.address = "10.97.0.1"

    def attack(self, attempt: Callable[[str], None], when: str, ports: list[int], replay: list[str]) -> None:
        words = [*self._enter, sys.executable, "-I", str(STRANGERS), NOBODY]
        asked = json.dumps([self.address, ports, replay])
        done = subprocess.run(words, input=asked, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        for name, count in map(json.loads, done.stdout.splitlines()):
            attempt(f"{when}: {name}")
            # A knock that was recorded elsewhere is answered by a nonce and a proof, and by nothing after that.
            assert count <= (GREETING if replay else 0), f"{name} was answered {count} bytes"


class Tap:
    """A wire between a real comer and the host: it keeps what the comer says, and may change one bit of it."""

    def __init__(self, host: tuple[str, int], flips: list[int]) -> None:
        self.said: list[str] = []
        self._host, self._flips = host, flips
        self._listener = socket.create_server((host[0], 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                comer, _ = self._listener.accept()
                host = socket.create_connection(self._host)
            except OSError:
                return
            flip = self._flips.pop() if self._flips else None
            self.said.clear()
            for ends in ((comer, host, flip), (host, comer, None)):
                threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    def _pass_on(self, source: socket.socket, to: socket.socket, flip: int | None) -> None:
        at = 0
        while data := _received(source):
            if flip is not None and at <= flip < at + len(data):
                data = bytearray(data)
                data[flip - at] ^= 1
            at += len(data)
            try:
                if to.getpeername()[1] == self._host[1]:
                    self.said.append(bytes(data).hex())
                to.sendall(data)
            except OSError:
                break
        for end in (source, to):
            end.close()


def _received(source: socket.socket) -> bytes:
    try:
        return source.recv(1 << 16)
    except OSError:
        return b""


@pytest.mark.timeout(170)
@pytest.mark.long
@pytest.mark.parametrize("kind", ["another user", "another network"])
def test_a_stranger_gets_no_answer_and_the_run_ends_with_the_bits_of_the_undisturbed_one(
    run, undisturbed, attempt, kind
):
    with ExitStack() as stack:
        network, attacked = Network(kind, stack), run()
        port = free_port(network.address)
        meeting = ("-n", "1", "--nodes", "2", "--rendezvous")
        attacked.start(*meeting, f"tcp://{network.address}:{port}", "--node-rank", "0")
        until = time.monotonic() + 90
        while port not in attacked.ports():
            assert time.monotonic() < until
            time.sleep(0.01)
        network.attack(attempt, "before", [port], [])
        tap = Tap((network.address, port), [5, 20, 60, 90, 110, 130, 200])
        stack.callback(tap.close)
        changes = len(tap._flips)
        attacked.start(*meeting, f"tcp://{network.address}:{tap.port}", "--node-rank", "1")
        attacked.wait_for("during")
        assert not tap._flips
        for change in range(changes):
            attempt(f"before: changed bit {change}")
        ports = attacked.ports()
        network.attack(attempt, "during", ports[:2], [])
        attacked.go("during")
        attacked.wait_for("end")
        network.attack(attempt, "at the end", [port, *attacked.ports()[:1]], [])
        attacked.go("end")
        assert attacked.bits() == undisturbed
        # What was said on that wire opens no other run of the same user, at the same port.
        again = run()
        again.start(*meeting, f"tcp://{network.address}:{port}", "--node-rank", "0", waits=False)
        while port not in again.ports():
            time.sleep(0.01)
        network.attack(attempt, "another run", [port], tap.said[:4])
        again.start(*meeting, f"tcp://{network.address}:{port}", "--node-rank", "1", waits=False)
        assert again.bits() == undisturbed


@pytest.mark.slow
def test_another_user_finds_no_key_socket_or_port_of_a_run_on_one_machine(run, attempt):
    attacked = run()
    attacked.start("-n", "2")
    attacked.wait_for("during")
    look = """
import os, sys
pid = sys.argv[1]
os.setgid(65534), os.setuid(65534)
def tried(name, act):
    try:
        act()
    except OSError:
        print(name, "refused")
    else:
        print(name, "got in")
tried("environ", lambda: open(f"/proc/{pid}/environ").read())
tried("descriptors", lambda: os.listdir(f"/proc/{pid}/fd"))
for number in range(3, 20):
    tried(f"descriptor {number}", lambda: open(f"/proc/{pid}/fd/{number}", "rb").read(1))
tried("memory", lambda: open(f"/proc/{pid}/mem", "rb").read(1))
tried("signal", lambda: os.kill(int(pid), 0))
tried("key file", lambda: open(os.path.expanduser("~root/.local/state/samestep/key"), "rb").read())
for name in os.listdir("/tmp"):
    if name.startswith("samestep-0-") and os.stat("/tmp/" + name).st_uid == 0:
        tried(f"directory {name}", lambda: os.listdir("/tmp/" + name))
        tried(f"a socket in {name}", lambda: open(f"/tmp/{name}/0-0", "w"))
"""
    processes = [
        process
        for process in _family(attacked.processes[0].pid)
        if "train.py" in " ".join(process.cmdline()[-1:])
    ]
    assert len(processes) == 3  # the launcher and its workers
    for process in processes:
        done = subprocess.run(
            [shutil.which("python3") or sys.executable, "-I", "-c", look, str(process.pid)],
            capture_output=True, text=True, cwd="/",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert len(done.stdout.splitlines()) > 20
        for line in done.stdout.splitlines():
            attempt(line)
            assert line.endswith("refused"), line
        assert "SAMESTEP_KEY=" not in "".join(f"{name}={value} " for name, value in process.environ().items())
    for place in ("go-during", "go-end"):
        (attacked.home / place).touch()
    attacked.bits()
    left = "".join(path.read_text(errors="replace") for path in attacked.home.rglob("*") if path.is_file())
    key = Path("~/.local/state/samestep/key").expanduser()
    assert not key.exists() or key.read_bytes().hex() not in left


def test_a_comer_with_another_key_or_none_is_never_a_rank(attempt):
    key = bytes(range(32))
    opened = listen([0], ["127.0.0.1"])
    place = opened[0].getsockname()
    found = []
    hosting = threading.Thread(target=lambda: found.append(host(opened, Member("r", 0, 2, key, limit_s=60))))
    hosting.start()
    wrong = [
        bytes(32),
        key[::-1],
        key[:31],
        b"",
        *(bytes([*key[:at], 99, *key[at + 1 :]]) for at in (0, 31)),
    ]
    for other_key in wrong:
        attempt(f"the key {other_key.hex()}")
        with pytest.raises(RankMissing, match="found nothing with this run's key there"):
            join(lambda: [place], Member("r", 1, 2, other_key, limit_s=0.2))
        assert not found
    for at in range(0, 75, 15):
        attempt(f"a knock with byte {at} changed")
        with socket.create_connection(place) as line:
            line.sendall(knock(key, at))
            line.settimeout(2)
            assert line.recv(100) == b""
    join(lambda: [place], Member("r", 1, 2, key)).leave()
    hosting.join(10)
    found[0].leave()


def knock(key: bytes, at: int) -> bytes:
    nonce = os.urandom(32)
    said = bytearray(b"samestep-1\n" + nonce + derive(key, "greeting", nonce))
    said[at] ^= 1
    return bytes(said)
