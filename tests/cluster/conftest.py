"""Gives a test the cluster as it was when it started; it is brought up when the first test asks for it."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fournodes import Cluster, missing

_TABLE: list[str] = []
_LOSSES: list[str] = []


@pytest.fixture
def table() -> list[str]:
    return _TABLE


@pytest.fixture
def losses() -> list[str]:
    return _LOSSES


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _TABLE:
        terminalreporter.section("the same training, every way in")
        terminalreporter.line(f"{'way':<28}  ranks  {'node.local rank':<15}  {'adopted':<8}")
        for row in _TABLE:
            terminalreporter.line(row)
    if _LOSSES:
        terminalreporter.section("jobs that Slurm stopped in the middle")
        for row in _LOSSES:
            terminalreporter.line(row)


@pytest.fixture(scope="session")
def _up() -> Iterator[Cluster]:
    if lack := missing():
        (pytest.fail if os.environ.get("CI") else pytest.skip)(lack)
    with Cluster() as cluster:
        yield cluster


@pytest.fixture
def cluster(_up: Cluster) -> Iterator[Cluster]:
    yield _up
    _up.settle()


@pytest.fixture
def isolated(cluster: Cluster) -> Cluster:
    if not cluster.isolated:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("nodes have their own network only as root")
    return cluster
