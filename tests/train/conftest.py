"""A test with a `world` argument runs on every rank of real processes over Gloo, at sizes 1, 2 and 3."""

import inspect
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from textwrap import dedent
from typing import Any

import cloudpickle
import pytest
from forked import Nest

from samestep.start.port import hold_port

_PATIENCE_S = 50
_RANK = str(Path(__file__).with_name("ranks.py"))


def start(argv: Sequence[str], size: int, port: int, rank: int, **options: Any) -> "subprocess.Popen[str]":
    """A Python process that is a rank of a world, and of which nobody takes care."""
    world = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    # torch.compile looks a function's module up by its name
    here = {"RANK": rank, "LOCAL_RANK": rank, "OMP_NUM_THREADS": 1, "PYTHONPATH": Path(__file__).parents[2]}
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SAMESTEP")}
    return subprocess.Popen(
        [sys.executable, *argv],
        env=clean | {name: str(fact) for name, fact in (world | here).items()},
        text=True,
        start_new_session=True,
        **options,
    )


def end(processes: Sequence["subprocess.Popen[str]"]) -> None:
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


class Pool:
    """Ranks that wait for functions; one in which a test failed is thrown away."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._processes: list[subprocess.Popen[str]] = []
        self._lines: list[Connection] = []

    def call(self, function: Callable[..., None], arguments: dict[str, Any]) -> None:
        """Call a test on all ranks; fails where one of them fails."""
        module = inspect.getmodule(function)
        cloudpickle.register_pickle_by_value(module)
        try:
            sent = cloudpickle.dumps((function, arguments))
        finally:
            cloudpickle.unregister_pickle_by_value(module)
        try:
            if not self._lines:
                self._start()
            for line in self._lines:
                line.send_bytes(sent)
            told = {rank: self._answer(rank) for rank in range(self.size)}
        except BaseException:
            self.stop()
            raise
        if any(told.values()):
            self.stop()
            pytest.fail(
                "\n".join(f"on rank {rank} of {self.size}:\n{text}" for rank, text in told.items() if text),
                pytrace=False,
            )

    def stop(self) -> None:
        """Let the ranks end by themselves, and see that they do."""
        for line in self._lines:
            line.close()
        until = time.monotonic() + 5
        while any(one.poll() is None for one in self._processes) and time.monotonic() < until:
            time.sleep(0.01)
        end(self._processes)
        self._processes, self._lines = [], []

    def _start(self) -> None:
        held, port = hold_port()
        pipes = [Pipe() for _ in range(self.size)]
        with held:
            self._lines = [ours for ours, _ in pipes]
            self._processes = [
                start([_RANK, str(theirs.fileno())], self.size, port, rank, pass_fds=[theirs.fileno()])
                for rank, (_, theirs) in enumerate(pipes)
            ]
            for _, theirs in pipes:
                theirs.close()
            if failures := [text for rank in range(self.size) if (text := self._answer(rank))]:
                raise RuntimeError(f"the ranks did not start: {failures}")

    def _answer(self, rank: int) -> str | None:
        try:
            if not self._lines[rank].poll(_PATIENCE_S):
                return "no answer"
            text: str | None = cloudpickle.loads(self._lines[rank].recv_bytes())
            return text
        except EOFError:
            return "it ended"


@pytest.fixture(scope="session")
def nest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nest]:
    with Nest(tmp_path_factory.mktemp("nest")) as found:
        yield found


SMALL = """
    import os, sys, time
    import torch, samestep
    world = samestep.init()
    model = samestep.replicate(torch.nn.Linear(4, 3))
    data = torch.utils.data.TensorDataset(torch.arange(48.0).reshape(12, 4))
    train = samestep.loader(data, 3, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
"""


@pytest.fixture
def run(nest, tmp_path):
    """Runs what is added to the small script: exit codes, and what each rank said."""

    def started(source, size=1, *argv, env=None):
        script = tmp_path / "train.py"
        script.write_text(dedent(SMALL) + dedent(source))
        ranks = nest.start(script, size, *argv, env=env)
        return nest.wait(ranks), [one.said for one in ranks]

    return started


@pytest.fixture(scope="session")
def _pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    pool = Pool(int(request.param))
    yield pool
    pool.stop()


@pytest.fixture
def world(_pool: Pool) -> Pool:
    """Here the ranks; in the test itself, on each of them, its World."""
    return _pool


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "world" in metafunc.fixturenames:
        mark = metafunc.definition.get_closest_marker("sizes")
        sizes = mark.args if mark else (1, 2, 3)
        metafunc.parametrize(
            "_pool", sizes, indirect=True, scope="session", ids=[f"{one}-ranks" for one in sizes]
        )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "sizes: the numbers of ranks that a test with a world runs on")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    pool = pyfuncitem.funcargs.get("world")
    if not isinstance(pool, Pool):
        return None
    names = set(inspect.signature(pyfuncitem.obj).parameters) - {"world"}
    pool.call(pyfuncitem.obj, {name: pyfuncitem.funcargs[name] for name in names})
    return True


class Script:
    """A script of its own processes, for what happens when they end."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._started: list[subprocess.Popen[str]] = []
        self._held: list[socket.socket] = []

    def start(self, source: str, size: int, *arguments: str) -> list["subprocess.Popen[str]"]:
        path = self.home / "train.py"
        path.write_text(dedent(source))
        held, port = hold_port()
        self._held.append(held)
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "cwd": self.home}
        started = [start([str(path), *arguments], size, port, rank, **options) for rank in range(size)]
        self._started += started
        return started

    def run(self, source: str, size: int, *arguments: str) -> list[tuple[int, str, str]]:
        """Exit code, stdout and stderr of every rank."""
        return [(one.wait(_PATIENCE_S), *one.communicate()) for one in self.start(source, size, *arguments)]

    def stop(self) -> None:
        end(self._started)
        for held in self._held:
            held.close()


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Script]:
    found = Script(tmp_path)
    yield found
    found.stop()
