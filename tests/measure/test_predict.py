"""The model behind `scale --predict` gives what can be worked out by hand."""

import sys

import pytest

from samestep.errors import UsageError, WorkerFailed
from samestep.measure.demo import SCRIPT
from samestep.measure.predict import SWEEP, Link, Model, buckets, exchange_end, link_from_sweep, link_of
from samestep.measure.scale import Measured, Variant
from samestep.measure.verdict import rows_of
from samestep.steptimes import PARTS, SHOWN, Breakdown

MB = 1 << 20


def model(link, jitter=(1.0,), weak=False, sizes=(1, 2), pieces=64):
    """Of steps with 10 ms of data, 40 of forward and 80 of backward at one process, and 5 ms of rest at any size."""
    runs = []
    for size in sizes:
        parts = {"data": 0.01 / size, "forward": 0.04 / size, "backward": 0.08 / size, "rest": 0.005}
        ranks, step_s = [dict.fromkeys(PARTS, 0.0) | parts] * size, sum(parts.values())
        said = Breakdown(step_s, 64 / step_s, 6400, dict.fromkeys(SHOWN, 0.0), ranks, None, None)
        runs.append(Measured(Variant(size, 1), 0, 1.0, 200, said))
    fine = [((at + 1) / 8, MB / 2) for at in range(8)]
    return Model(rows_of(runs, [run.variant for run in runs]), fine, link, 64, pieces, jitter, weak)


FAST = Link(1e15, 0.0)


@pytest.mark.parametrize(
    ("text", "bandwidth", "latency_s"),
    [("25GB/s,5us", 25e9, 5e-6), ("200Mbit/s,0.1ms", 25e6, 1e-4), ("1.5 GB/s, 30 us", 1.5e9, 3e-5)],
)
def test_a_link_is_bytes_or_bits_a_second_and_a_time(text, bandwidth, latency_s):
    link = link_of(text, is_gloo=True)
    assert (link.bandwidth, link.latency_s) == (bandwidth, pytest.approx(latency_s))
    assert str(link_of(str(link), is_gloo=True)) == str(link)


@pytest.mark.parametrize("text", ["25GB/s", "fast,5us", "0GB/s,5us", "25GB,5us"])
def test_what_is_no_link_is_refused(text):
    with pytest.raises(UsageError, match="is not a bandwidth and a latency"):
        link_of(text, is_gloo=True)


def test_buckets_fill_up_as_ddps_do():
    fine = [(at, MB / 2) for at in range(8)]
    assert buckets(fine, 1.0) == [(1, MB), (3, MB), (5, MB), (7, MB)]
    assert buckets(fine, None) == [(1, MB), (7, 3 * MB)]  # a first one of 1 MB, others of 25
    assert buckets(fine, 0.1) == fine


def test_buckets_share_a_link_and_wait_for_a_lane():
    link = Link(1e6, 0.0)
    assert exchange_end([(0.0, 1e6)], 2, link) == pytest.approx(1.0)
    assert exchange_end([(0.0, 1e6), (0.0, 1e6)], 2, link) == pytest.approx(2.0)
    assert exchange_end([(0.0, 1e6), (5.0, 1e6)], 2, link) == pytest.approx(6.0)
    slow = Link(1e15, 0.1)  # 0.4 s of latency each: two of three pass beside each other, the third after them
    assert exchange_end([(0.0, 1.0)] * 3, 2, slow) == pytest.approx(0.8)
    assert exchange_end([(0.0, 1.0)] * 2, 2, Link(1e15, 0.1, is_gloo=False)) == pytest.approx(0.4)


@pytest.mark.parametrize("script", [SWEEP, SCRIPT], ids=["sweep", "demo"])
def test_no_file_beside_a_script_of_the_package_has_the_name_of_a_module_of_python(script):
    """Python finds those first: torch.profiler found measure/profile.py, and the link could not be measured."""
    assert script.is_file()
    assert {path.stem for path in script.parent.glob("*.py")} & sys.stdlib_module_names == set()


def test_a_link_is_found_again_in_the_times_of_its_all_reduces():
    link = Link(25e6, 1e-4)
    sweep = [(size, link.latency_of(2) + size / 25e6) for size in (1, 1 << 19, 1 << 21, 1 << 23)]
    found = link_from_sweep(sweep, 2)
    assert (found.bandwidth, found.latency_s) == (
        pytest.approx(25e6, rel=1e-3),
        pytest.approx(1e-4, rel=1e-3),
    )


def test_what_a_burst_carries_does_not_make_a_link_faster():
    sweep = [(4096, 1e-4), *((size, 1e-4 + (size - 65536) / 25e6) for size in (1 << 19, 1 << 21, 1 << 23))]
    assert link_from_sweep(sweep, 2).bandwidth == pytest.approx(25e6, rel=1e-3)


def test_a_link_that_was_measured_beside_other_programs_is_refused():
    # the second link is slow at its end
    disturbed = ((0.005, 0.002, 0.004, 0.0055), (0.003, 0.001, 0.0015, 0.004))
    for took in disturbed:
        with pytest.raises(WorkerFailed, match="give it with --link"):
            link_from_sweep(list(zip((4096, 1 << 19, 1 << 21, 1 << 23), took, strict=True)), 2)


@pytest.mark.parametrize("sizes", [(1, 2), (1,), (2,)])
def test_parts_shrink_with_the_share_and_the_rest_does_not(sizes):
    assert model(FAST, sizes=sizes).step_s(8)[0] == pytest.approx(0.13 / 8 + 0.005)
    assert model(FAST, weak=True, sizes=(1,)).step_s(8)[0] == pytest.approx(0.135)


def test_a_step_waits_for_the_largest_share_where_samples_do_not_divide():
    assert model(FAST).step_s(48)[0] == pytest.approx(0.13 * 2 / 64 + 0.005)
    assert model(FAST, pieces=4).step_s(3)[0] == pytest.approx(0.13 * 2 / 4 + 0.005)  # four microbatches
    assert model(FAST, pieces=4, sizes=(1,)).step_s(3)[0] == pytest.approx(0.13 * 2 / 4 + 0.005)
    assert [model(FAST, weak=weak).predict(size).size for weak, size in ((False, 64), (True, 65))] == [64, 65]
    with pytest.raises(
        WorkerFailed, match="65 processes cannot share the 64 samples or microbatches of a step"
    ):
        model(FAST).predict(65)


def test_the_slowest_of_many_is_the_largest_of_as_many_draws():
    uniform = [at / 500 for at in range(1001)]  # 0 to 2: the largest of n lies at 2 n / (n + 1)
    assert model(FAST, uniform).step_s(1)[0] == pytest.approx(0.135, rel=0.01)
    assert model(FAST, uniform).step_s(4)[0] == pytest.approx((0.13 / 4 + 0.005) * 1.6, rel=0.01)


def test_an_exchange_that_outlasts_backward_is_waited_for_and_smaller_buckets_help():
    found = model(Link(40e6, 0.0)).predict(2)
    assert found.waits > 0.2
    assert found.best_mb < 5
    assert found.best_gain > 1.05
    assert found.low < found.samples_per_second < found.high
    assert model(FAST).predict(2).waits == pytest.approx(0, abs=1e-6)
    assert model(FAST).predict(1).efficiency == pytest.approx(1.0)
