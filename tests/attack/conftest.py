"""Attacks: each test makes attempts and counts them; none may succeed. The last line says how many there were."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def attempt(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Call it with an attempt's name before each attempt; a test without it counts as none."""
    return lambda name: request.node.user_properties.append(("attempt", name))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    counts: Counter[str] = Counter()
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            names = [name for name, _ in report.user_properties] if report.when == "call" else []
            counts["all"] += names.count("attempt")
            # a failed test stops at the attempt that succeeded, which is its last
            counts["succeeded"] += outcome == "failed" and "attempt" in names
    if counts["all"]:
        terminalreporter.write_line(f"attempts {counts['all']} | succeeded {counts['succeeded']}")
