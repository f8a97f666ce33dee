"""Facts in words."""

import pytest

from samestep.text import duration, figures, name_ranks, printable, size, step_time


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([2], "rank 2"),
        ([1, 0], "ranks 0, 1"),
        (range(8), "ranks 0, 1, 2, 3, 4, 5, 6, 7"),
        ([3, *range(5, 13)], "ranks 3, 5-12"),
        (range(1000), "ranks 0-999"),
        (range(0, 96, 2), "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 40 more"),
    ],
)
def test_many_ranks_are_shortened_and_few_are_listed(ranks, words):
    assert name_ranks(ranks) == words


def test_ranks_are_listed_beside_their_hosts():
    hosts = ["a", "a", "b", "a"]
    assert name_ranks([3, 2, 0], hosts) == "ranks 0, 3 (a), 2 (b)"
    assert name_ranks([5], hosts, "node") == "node 5"


def test_sizes_take_the_unit_of_the_larger_number():
    assert size(2_100_000_000) == "2.1 GB"
    assert size(400_000_000, of=2_100_000_000) == "0.4 of 2.1 GB"
    assert size(12) == "0.0 kB"


def test_durations_have_at_most_two_units():
    assert [duration(seconds) for seconds in (4.21, 34.04, 59.7, 192, 7512)] == [
        *("4.2 s", "34 s", "1 min 0 s", "3 min 12 s", "2 h 5 min")
    ]


def test_large_numbers_have_no_exponent_and_long_steps_are_in_seconds():
    assert [figures(number) for number in (0.0125, 8.0549, 99.96, 1254.3)] == [
        "0.0125",
        "8.05",
        "100",
        "1,254",
    ]
    steps = (0.0000123, 0.0527, 0.1284, 0.9999, 3.17, 4321.0)
    assert [step_time(step) for step in steps] == [
        "0.0123 ms", "52.7 ms", "128 ms", "1,000 ms", "3.17 s", "4,321 s",
    ]  # fmt: skip


def test_foreign_text_is_printed_on_one_bounded_line_without_control_characters():
    assert printable("a\x1b[31m\n\udc80é") == "a\\x1b[31m\\n\\udc80é"
    assert len(printable("\x00" * 10**6)) == 200
    assert printable("x" * 200) == "x" * 200
