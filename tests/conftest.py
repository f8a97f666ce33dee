"""Holds for every test: under CI what needs Slurm, MPI, root or a shell runs, and nothing is left running."""

import gc
import os
import secrets
import signal
import sys
from collections.abc import Generator, Iterator
from typing import Any

import psutil
import pytest
from forked import Nest

_NEEDS = {"slurm", "mpi", "root", "shell"}
_MARK = "STARTED_BY_TESTS"
_CLUSTER = "tests/cluster/"
# Slow folders and files; two pytest workers that run these first end at about the same time.
_BEGUN_FIRST = (
    *(_CLUSTER, "tests/train/checkpoint/", "tests/train/group/", "tests/start/", "tests/verify/"),
    *("tests/attack/test_limits.py", "tests/types/"),
)
_DEVICES = ("/dev/nvidia0", "/dev/kfd")
_OFTEN_IGNORED = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


def pytest_configure(config: pytest.Config) -> None:
    # On a busy machine the meter may print its lines also for a short run.
    os.environ.setdefault("SAMESTEP_METER", "0")
    # Set by whoever started the tests; `samestep run` would remark on it.
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        os.environ.pop(name, None)
    if not os.environ.get("STARTED_FOR_A_MUTANT"):
        # Else hundreds of processes would each compile samestep, which takes a tenth of the time of torch's import.
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        sys.dont_write_bytecode = False
    if _starts_all(config):
        os.environ[_MARK] = secrets.token_hex(8)
    _start_children_with_default_signals()
    # On a machine with a GPU the tests are still those of the cores, unless SAMESTEP_TEST_DEVICE asks for it.
    if os.environ.get("SAMESTEP_TEST_DEVICE", "cpu") == "cpu" and any(map(os.path.exists, _DEVICES)):
        os.environ.update(CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not os.environ.get("LONG"):
        items[:] = [item for item in items if item.get_closest_marker("long") is None]
    items.sort(key=lambda item: not item.nodeid.startswith(_BEGUN_FIRST))


def pytest_collection_finish() -> None:
    # What is imported by now stays; to look at it takes 0.2 s whenever a test collects garbage.
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """Give each worker a file at a time, and one of them all of the cluster, which is there once."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _CLUSTER if nodeid.startswith(_CLUSTER) else nodeid.partition("::")[0]

    config.option.loadscopereorder = False
    return ByFile(config, log)


@pytest.fixture(scope="session")
def nest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nest]:
    """Forks ranks from a process that has torch, for tests that are not about starting."""
    with Nest(tmp_path_factory.mktemp("nest")) as found:
        yield found


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    needs = _NEEDS.intersection(mark.name for mark in item.iter_markers())
    if report.skipped and needs and os.environ.get("CI") == "true" and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = (
            f"{item.nodeid} needs {' and '.join(needs)}, which CI must have: {report.longrepr[2]}"
        )
    return report


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None]:
    yield
    # With xdist its workers have ended only now.
    if _starts_all(session.config):
        _end_what_is_left(session)


def _starts_all(config: pytest.Config) -> bool:
    """Whether this is pytest itself and no worker of xdist."""
    return not hasattr(config, "workerinput")


def _start_children_with_default_signals() -> None:
    """Under nohup and in a shell's background some signals are ignored, and children would inherit that."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in _OFTEN_IGNORED:
        if signal.getsignal(number) == signal.SIG_IGN:
            # This handler does nothing either, but exec resets it to the default, which children get.
            signal.signal(number, lambda *_: None)


def _end_what_is_left(session: pytest.Session) -> None:
    # torch's loader workers check every 5 s whether their rank is alive
    _, left = psutil.wait_procs(list(_started_here()), timeout=8)
    for process in left:
        command = " ".join(process.info["cmdline"])
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        session.config.get_terminal_writer().line(
            f"\nleft running by the tests, killed now: {command}", red=True
        )
        process.kill()


def _started_here() -> Iterator[psutil.Process]:
    for process in psutil.process_iter(["environ", "cmdline"]):
        environ, command = process.info["environ"] or {}, process.info["cmdline"] or []
        ours = environ.get(_MARK) == os.environ[_MARK]
        if ours and "multiprocessing.resource_tracker" not in " ".join(command):
            yield process
