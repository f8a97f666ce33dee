"""Holds for every test: under CI what needs Slurm, MPI or root runs, and nothing is left running."""

import os
import secrets
from collections.abc import Generator, Iterator

import psutil
import pytest

_NEEDS = {"slurm", "mpi", "root"}
_MARK = {"STARTED_BY_TESTS": secrets.token_hex(8)}


def pytest_configure() -> None:
    os.environ.update(_MARK)


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


def pytest_sessionfinish(session: pytest.Session) -> None:
    _, left = psutil.wait_procs(list(_started_here()), timeout=5)
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
        if environ.items() >= _MARK.items() and "multiprocessing.resource_tracker" not in " ".join(command):
            yield process
