"""A test with a `world` argument runs on every rank of real processes over Gloo, at sizes 1, 2 and 3."""

import inspect
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from textwrap import dedent
from typing import Any

import cloudpickle
import pytest
from forked import Nest, Rank, end_group

from samestep.rendezvous.listen import hold_port

_PATIENCE_S = 50
_RANK = Path(__file__).with_name("ranks.py")


class Pool:
    """Ranks that wait for functions; one in which a test failed is thrown away."""

    def __init__(self, size: int, nest: Nest) -> None:
        self.size = size
        self._nest = nest
        self._ranks: list[Rank] = []
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
        self._nest.wait(self._ranks, 5)
        for rank in self._ranks:
            end_group(rank)
        self._nest.wait(self._ranks, 5)
        self._ranks, self._lines = [], []

    def _start(self) -> None:
        with Listener(family="AF_UNIX") as listener:
            asked = {name: value for name, value in os.environ.items() if name.startswith("SAMESTEP_TEST_")}
            self._ranks = self._nest.start(_RANK, self.size, listener.address, env=asked)
            by_rank = {}
            for _ in range(self.size):
                line = listener.accept()
                by_rank[line.recv()] = line
        self._lines = [by_rank[rank] for rank in range(self.size)]
        if failures := [text for rank in range(self.size) if (text := self._answer(rank))]:
            raise RuntimeError(f"the ranks did not start: {failures}")

    def _answer(self, rank: int) -> str | None:
        try:
            if not self._lines[rank].poll(_PATIENCE_S):
                return "no answer"
            text: str | None = cloudpickle.loads(self._lines[rank].recv_bytes())
            return text
        except EOFError:
            return f"it ended: {self._ranks[rank].said}"


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
        return nest.wait(ranks), [rank.said for rank in ranks]

    return started


@pytest.fixture(scope="module")
def _pools(nest: Nest) -> Iterator[dict[int, Pool]]:
    """The pools that the tests of a file have asked for, by size: what one file sets is not there in the next."""
    pools: dict[int, Pool] = {}
    yield pools
    for pool in pools.values():
        pool.stop()


@pytest.fixture
def world(request: pytest.FixtureRequest, _pools: dict[int, Pool], nest: Nest) -> Pool:
    """Here the ranks; in the test itself, on each of them, its World."""
    size = int(request.param)
    return _pools.setdefault(size, Pool(size, nest))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "world" in metafunc.fixturenames:
        mark = metafunc.definition.get_closest_marker("sizes")
        sizes = mark.args if mark else (1, 2, 3)
        metafunc.parametrize("world", sizes, indirect=True, ids=[f"{size}-ranks" for size in sizes])


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
    """A script on processes of its own, for what happens when they end."""

    def __init__(self, home: Path, nest: Nest) -> None:
        self.path = home / "train.py"
        self._nest = nest

    def run(self, source: str, size: int) -> list[tuple[int | None, str, str]]:
        """Exit code, stdout and stderr of every rank, each forked from a process that has torch."""
        self.path.write_text(dedent(source))
        ranks = self._nest.start(self.path, size, cwd=self.path.parent, apart=True)
        codes = self._nest.wait(ranks, _PATIENCE_S)
        return [(code, rank.said, rank.complained) for code, rank in zip(codes, ranks, strict=True)]

    def run_interpreters(self, source: str, size: int) -> list[tuple[int | None, str, str]]:
        """The same on interpreters of their own, which also take themselves to pieces when they end."""
        self.path.write_text(dedent(source))
        held, port = hold_port()
        world = {
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        clean = {name: value for name, value in os.environ.items() if not name.startswith("SAMESTEP")}
        ranks = []
        with held:
            for rank in range(size):
                here = world | {"RANK": rank, "LOCAL_RANK": rank, "OMP_NUM_THREADS": 1}
                ranks.append(
                    subprocess.Popen(
                        [sys.executable, self.path],
                        env=clean | {name: str(fact) for name, fact in here.items()},
                        cwd=self.path.parent,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE,
                        text=True,
                        start_new_session=True,
                    )
                )
            try:
                return [(process.wait(_PATIENCE_S), *process.communicate()) for process in ranks]
            finally:
                for process in ranks:
                    if process.poll() is None:
                        os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture
def script(tmp_path: Path, nest: Nest) -> Script:
    return Script(tmp_path, nest)
