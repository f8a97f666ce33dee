"""Every script that `make gpu` runs is tried here on the cores, so that none fails for itself where a GPU is."""

import os

import pytest
from gpu import plan

ALL = [*plan.of_one(), *plan.of_many(2)]
# Checks that differ by their backend alone are the same on the cores, and the kinds of numbers take long.
SHORT = {
    str(check.commands): check
    for check in ALL
    if os.environ.get("LONG") or ("in b" not in check.name and "in c" not in check.name)
}
TESTS = [check for check in ALL if "pytest" in check.commands[0]]


def test_every_script_is_in_a_plan_and_its_checks_have_names_of_their_own():
    for checks in ([*plan.of_one()], [*plan.of_many(8)]):
        assert len({check.name for check in checks}) == len(checks)
    assert len(TESTS) == 2
    scripts = {path.name for path in plan.HERE.glob("*.py")} - {"plan.py", "test_plan.py", "on_device.py"}
    used = {word.rpartition("/")[2] for check in ALL for command in check.commands for word in command}
    assert scripts <= used


_ALWAYS = ("device choice",)


@pytest.mark.skipif(plan.ON_GPU, reason="a GPU is here: make gpu")
@pytest.mark.parametrize(
    "check",
    [
        pytest.param(
            check, id=check.name, marks=pytest.mark.slow if check.name in _ALWAYS else pytest.mark.long
        )
        for check in SHORT.values()
        if check not in TESTS and "sanitizer" not in check.name
    ],
)
def test_a_check_passes_on_the_cores(check):
    assert plan.run(check)["failure"] == ""


def test_a_check_that_fails_or_prints_unlike_lines_is_seen():
    python = plan.sys.executable
    assert "unlike" in plan.run(plan.Check("", [[python, "-c", f"print({n})"] for n in (1, 2)]))["failure"]
    assert "boom" in plan.run(plan.Check("", [[python, "-c", "raise SystemExit('boom')"]]))["failure"]
    slow = plan.run(plan.Check("", [[python, "-c", "input.__self__.__import__('time').sleep(9)"]], {}, 1))
    assert slow["failure"] == "not done after 1 s"
    late = plan.run(plan.Check("", [[python, "-c", ""]]), until=plan.time.monotonic())
    assert late["failure"] == "not begun: the time is over"
