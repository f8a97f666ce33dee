"""Gives a test the cluster as it was when it started; it is brought up when the first test asks for it."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fournodes import Cluster, missing


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
