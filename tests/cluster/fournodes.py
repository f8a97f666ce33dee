"""A real Slurm of four nodes on this machine, up in a second; when its owner dies, so does every part of it.

As root each node has its own network, host name and process tree, so a link can be cut or limited and a node
can lose its power. Otherwise the nodes are four `slurmd` on the loopback address.
Covered: what Slurm itself does. Not covered: core binding (the cores are made up) and accounting.
"""

import fcntl
import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import IO

import network
import psutil
from network import DYING, HUB, Network

NODES = ("ssnode1", "ssnode2", "ssnode3", "ssnode4")
_TOOLS = "munged slurmctld slurmd sbatch srun scontrol setpriv nsenter unshare ip tc"
_PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
_PREFIX = "samestep-cluster-"
_ENDS = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE")
_DEVICES = 8
# A site's own script may ask for 72 of them.
_SHAPE = f"CPUs=80 RealMemory=1000 Gres=gpu:{_DEVICES} Feature=gpu,cpu,a100,h100,v100-16g,v100-32g"


def missing() -> str | None:
    """What this machine lacks for a cluster, as a sentence; None where it has everything."""
    lacking = [tool for tool in _TOOLS.split() if shutil.which(tool, path=_PATH) is None]
    return f"{', '.join(lacking)} not installed" if lacking else None


class Cluster:
    """Four NODES, partitions `main` and (preempting) `urgent`; a `with` brings them up and down."""

    def __init__(self, *, isolated: bool | None = None) -> None:
        self.isolated = network.possible() if isolated is None else isolated
        self.state = Path()
        self._lock: IO[str] | None = None
        self._network: Network | None = None
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._disturbed = False

    def __enter__(self) -> "Cluster":
        if lack := missing():
            raise RuntimeError(lack)
        _clear_abandoned()
        self.state = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self.state.chmod(0o755)
        self._lock = (self.state / "lock").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            if self.isolated:
                self._network = Network(self.state / "hosts", NODES)
            self._write_files()
            self._start_munge()
            self._start_controller()
            for node in NODES:
                self._start_slurmd(node)
            self.wait_nodes("idle")
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Kill every part at once, and remove the files."""
        for daemon in self._daemons.values():
            _kill(daemon)
        if self._network:
            self._network.close()
        if self._lock:
            _clear(self.state)
            self._lock.close()
        self._daemons, self._network, self._lock, self._disturbed = {}, None, None, False

    # What a test does with it.

    def command(self, *words: str, node: str | None = None, cwd: str | Path | None = None) -> list[str]:
        """The words as a command on the login machine, or on a node outside Slurm; signals reach it."""
        enter = self._network.enter(node or HUB) if self._network else []
        environ = (f"SLURM_CONF={self.conf}", f"PATH={_PATH}")
        return [*enter, "env", "-C", str(cwd or Path.cwd()), *environ, *words]

    def run(
        self, *words: str, node: str | None = None, cwd: str | Path | None = None, timeout: float = 30
    ) -> str:
        """Standard output of a command that must succeed."""
        done = subprocess.run(
            self.command(*words, node=node, cwd=cwd), capture_output=True, text=True, timeout=timeout
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout

    def submit(self, *words: str, cwd: str | Path | None = None) -> str:
        """The id of a job submitted by `sbatch words`."""
        return self.run("sbatch", "--parsable", *words, cwd=cwd).strip().split(";")[0]

    def field(self, job: str, name: str) -> str:
        """A field of `scontrol show job`, such as JobState or Restarts."""
        words = self.run("scontrol", "--oneliner", "show", "job", job).split()
        return next(word.split("=", 1)[1] for word in words if word.startswith(f"{name}="))

    def wait_state(self, job: str, *states: str, timeout: float = 30) -> str:
        """Wait until the job is in one of the states; an end that is none of them is an error at once."""
        deadline = time.monotonic() + timeout
        while (state := self.field(job, "JobState")) not in states:
            if state in _ENDS or time.monotonic() > deadline:
                raise RuntimeError(f"job {job} is {state}, not {' or '.join(states)}")
            time.sleep(0.1)
        return state

    def wait_nodes(self, *states: str, nodes: Sequence[str] = NODES, timeout: float = 30) -> None:
        """Wait until every one of the nodes is in one of the states that `sinfo` prints."""
        deadline = time.monotonic() + timeout
        while not all((now := self._node_states()).get(node) in states for node in nodes):
            if time.monotonic() > deadline:
                raise RuntimeError(f"nodes are {now}, not {' or '.join(states)}")
            time.sleep(0.05)

    def _node_states(self) -> dict[str, str]:
        words = self.command("sinfo", "--Node", "--noheader", "--format=%N %T")
        listed = subprocess.run(words, capture_output=True, text=True, timeout=30).stdout
        return dict(line.split() for line in listed.splitlines())

    def cut(self, node: str) -> None:
        """Let no packet to or from the node through; neither end is told."""
        self._links.cut(node)

    def restore(self, node: str) -> None:
        """Undo cut and limit."""
        self._links.restore(node)

    def limit(self, node: str, rate: str) -> None:
        """Let at most the rate (as `tc` writes it: 10mbit) through, each way."""
        self._links.limit(node, rate)

    @property
    def _links(self) -> Network:
        if self._network is None:
            raise RuntimeError("nodes have links of their own only as root")
        self._disturbed = True
        return self._network

    def kill_node(self, node: str) -> None:
        """Take its power: slurmd and all that it started are gone at once."""
        self._disturbed = True
        _kill(self._daemons.pop(node))
        if not self._network:
            _kill_strays(f"SLURM_CONF={self.conf}", f"SLURMD_NODENAME={node}")

    def start_node(self, node: str) -> None:
        """Give it its power back, and wait until Slurm may use it."""
        self._start_slurmd(node)
        self.wait_nodes("idle", "mixed", "allocated", nodes=[node])

    def restart_controller(self) -> None:
        """Let slurmctld save its state and end, and start it again on that."""
        controller = self._daemons.pop(HUB)
        self.run("scontrol", "shutdown", "slurmctld")
        controller.wait(timeout=30)
        self._start_controller()

    def settle(self) -> None:
        """As it was when it started: kept where a test left nothing behind, made anew otherwise."""
        if (
            self._disturbed
            or self.run("squeue", "--noheader")
            or self._node_states() != dict.fromkeys(NODES, "idle")
        ):
            self.stop()
            self.__enter__()

    @property
    def conf(self) -> Path:
        """The value of SLURM_CONF."""
        return self.state / "slurm.conf"

    # How it is built.

    def _write_files(self) -> None:
        (self.state / "controller").mkdir()
        if self._network:
            controller, port, address = HUB, 6817, self._network.address
            lines = [f"NodeName={node} NodeAddr={address[node]} {_SHAPE}" for node in NODES]
        else:
            controller, (port, *ports) = socket.gethostname().split(".")[0], _free_ports(1 + len(NODES))
            address = {HUB: "127.0.0.1"}
            where = f"NodeHostname={controller} NodeAddr=127.0.0.1 {_SHAPE}"
            lines = [f"NodeName={node} Port={own} {where}" for node, own in zip(NODES, ports, strict=True)]
        template = Path(__file__).with_name("slurm.conf").read_text()
        self.conf.write_text(
            template.format(
                controller=f"{controller}({address[HUB]})",
                port=port,
                user=getpass.getuser(),
                state=self.state,
                nodes="\n".join(lines),
                names=",".join(NODES),
            )
        )
        for device in range(_DEVICES):
            # Only with device files does Slurm set CUDA_VISIBLE_DEVICES; any character device will do.
            (self.state / f"gpu{device}").symlink_to("/dev/null")
        (self.state / "gres.conf").write_text(f"Name=gpu File={self.state}/gpu[0-{_DEVICES - 1}]\n")
        (self.state / "cgroup.conf").write_text("CgroupAutomount=no\n")

    def _start_munge(self) -> None:
        key = self.state / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        files = [
            f"--{name}={self.state}/munge.{name}" for name in ("socket", "pid-file", "log-file", "seed-file")
        ]
        self._start("munge", ["munged", "--foreground", f"--key-file={key}", *files])
        self._wait_until("munge", ["test", "-S", f"{self.state}/munge.socket"])

    def _start_controller(self) -> None:
        own_tree = ("unshare", "--pid", "--fork", "--kill-child") if self._network else ()
        self._start(HUB, [*own_tree, "slurmctld", "-D"], inside=HUB)
        self._wait_until(HUB, self.command("scontrol", "ping"))

    def _start_slurmd(self, node: str) -> None:
        unshare = ("unshare", "--mount", "--pid", "--mount-proc", "--fork", "--kill-child")
        # The shell is process 1 of the node and reaps what jobs leave behind; slurmd would not.
        words = (*(unshare if self._network else ()), "bash", "-c", f"slurmd -D -N {node}; exit $?")
        self._start(node, words, inside=node)

    def _start(self, name: str, words: Sequence[str], inside: str | None = None) -> None:
        enter = self._network.enter(inside) if self._network and inside else []
        environ = {"PATH": _PATH, "SLURM_CONF": str(self.conf), "HOME": str(Path.home()), "LANG": "C.UTF-8"}
        with (self.state / f"{name}.out").open("ab") as out:
            self._daemons[name] = subprocess.Popen(
                [*DYING, *enter, *words],
                env=environ,
                cwd=self.state,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )

    def _wait_until(self, name: str, check: Sequence[str]) -> None:
        deadline = time.monotonic() + 20
        while subprocess.run(check, capture_output=True).returncode:
            if time.monotonic() > deadline or self._daemons[name].poll() is not None:
                raise RuntimeError(f"{name} did not start: {(self.state / f'{name}.out').read_text()}")
            time.sleep(0.02)


def _kill(daemon: "subprocess.Popen[bytes]") -> None:
    """Kill it at once; of one with its own process tree the first process, so that `unshare` reaps it."""
    own_tree = isinstance(daemon.args, list) and "--kill-child" in daemon.args
    first = psutil.Process(daemon.pid).children() if own_tree and daemon.poll() is None else []
    for process in first or [daemon]:
        process.kill()
    daemon.wait()


def _free_ports(count: int) -> list[int]:
    with ExitStack() as bound:
        sockets = [bound.enter_context(socket.socket()) for _ in range(count)]
        for reserved in sockets:
            reserved.bind(("127.0.0.1", 0))
        return [reserved.getsockname()[1] for reserved in sockets]


def _clear_abandoned() -> None:
    """Remove what is left of clusters whose owner was killed."""
    for state in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError), (state / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _clear(state)


def _clear(state: Path) -> None:
    _kill_strays(f"SLURM_CONF={state}/slurm.conf")
    shutil.rmtree(state, ignore_errors=True)


def _kill_strays(*variables: str) -> None:
    """Kill every process that was started with these variables."""
    wanted = {variable.encode() for variable in variables}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if wanted <= {*(process / "environ").read_bytes().split(b"\0")}:
                os.kill(int(process.name), signal.SIGKILL)
