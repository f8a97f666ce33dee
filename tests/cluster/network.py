"""Machines inside this one, each with its own network and host name; all are gone with their owner."""

import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

HUB = "ssctl"
DYING = ("setpriv", "--pdeathsig", "KILL")


class Network:
    """A switch in the hub's network and a wire from it to each node; addresses are `10.77.0.<k>`."""

    def __init__(self, hosts: Path, nodes: Sequence[str]) -> None:
        self.address = {HUB: "10.77.0.254"} | {node: f"10.77.0.{k}" for k, node in enumerate(nodes, 1)}
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in self.address.items())]
        hosts.write_text("\n".join(lines) + "\n")
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        try:
            for name in self.address:
                self._holders[name] = _hold(name, hosts)
            for name in self.address:
                _wait_for(self._holders[name])
            self._run(HUB, "ip", "link", "add", "switch", "type", "bridge")
            self._run(HUB, "ip", "address", "add", f"{self.address[HUB]}/24", "dev", "switch")
            self._run(HUB, "ip", "link", "set", "switch", "up")
            for node in nodes:
                self._wire(node)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """The kernel takes a network away with the last process in it."""
        for holder in self._holders.values():
            holder.kill()
            holder.wait()

    def enter(self, name: str) -> list[str]:
        """What to put before a command to run it there."""
        return ["nsenter", "--target", str(self._holders[name].pid), "--net", "--uts", "--mount"]

    def cut(self, node: str) -> None:
        self._run(HUB, "ip", "link", "set", node, "nomaster")

    def restore(self, node: str) -> None:
        self._run(HUB, "ip", "link", "set", node, "master", "switch")
        for name, device in self._ends(node):
            subprocess.run(
                [*self.enter(name), "tc", "qdisc", "del", "dev", device, "root"], capture_output=True
            )

    def limit(self, node: str, rate: str) -> None:
        shape = ("root", "tbf", "rate", rate, "burst", "64kb", "latency", "100ms")
        for name, device in self._ends(node):
            self._run(name, "tc", "qdisc", "replace", "dev", device, *shape)

    def _run(self, name: str, *words: str) -> None:
        subprocess.run([*self.enter(name), *words], check=True)

    def _ends(self, node: str) -> Iterator[tuple[str, str]]:
        yield HUB, node
        yield node, "eth0"

    def _wire(self, node: str) -> None:
        # Made from outside: a process id means nothing to `ip` once it is inside.
        hub, holder = (str(self._holders[name].pid) for name in (HUB, node))
        end, other = (f"ss{os.getpid()}", "netns", hub), ("name", "eth0", "netns", holder)
        subprocess.run(["ip", "link", "add", *end, "type", "veth", "peer", *other], check=True)
        self._run(HUB, "ip", "link", "set", end[0], "name", node, "master", "switch", "up")
        self._run(node, "ip", "address", "add", f"{self.address[node]}/24", "dev", "eth0")
        self._run(node, "ip", "link", "set", "eth0", "up")


def possible() -> bool:
    """Whether this process may make machines."""
    words = ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "true"]
    return os.geteuid() == 0 and subprocess.run(words, capture_output=True).returncode == 0


def _hold(name: str, hosts: Path) -> "subprocess.Popen[bytes]":
    """A process that does nothing but keep a network, a host name and a private /etc/hosts alive."""
    setup = 'hostname "$1"; mount --bind "$2" /etc/hosts; ip link set lo up; echo; exec sleep infinity'
    words = [*DYING, "unshare", "--net", "--uts", "--mount", "sh", "-ec", setup, "sh", name, str(hosts)]
    return subprocess.Popen(words, stdout=subprocess.PIPE)


def _wait_for(holder: "subprocess.Popen[bytes]") -> None:
    assert holder.stdout is not None
    with holder.stdout as ready:
        if not ready.readline():
            raise RuntimeError("a machine could not be made; the reason is printed above")
