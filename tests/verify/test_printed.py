"""Which printed lines count as different, and which lines of two runs are compared."""

import math
from pathlib import Path

import pytest

from samestep.verify.lines import Line
from samestep.verify.printed import Printed, _differing_between_ranks, _is_times, _Near, _pairs
from samestep.verify.read import Run


@pytest.mark.parametrize(
    ("first", "second", "differs"),
    [
        ("accuracy 97.22%", "accuracy 32.50%", True),
        ("epoch 3, loss 0.1234", "epoch 3, loss 0.1235", False),
        ("loss 1.2e-3", "loss 4.1e-4", True),
        ("took 12.31 s, 4000 images/s", "took 7.22 s, 9000 images/s", False),
        ("correct 350", "correct 175", True),
        ("far 1.5e7312 0.5e-9999", "far 1.5e7313 0.5e-9998", False),
        ("loss 1.61361 min 0.00235", "loss 1.76002 min 0.00235", True),
        ("mean 2 min: 0.1 max 4", "mean 3 min: 0.1 max 4", True),
        ("mean 1.5 min -0.1 s", "mean 1.7 min -0.1 s", False),
        ("mean 1.5 s 0.2", "mean 1.7 s 0.2", True),
        ("mean 1.5 s=nan", "mean 1.9 s=nan", True),
        ("entropy 0.5 h 2 min 0.1 s 0.2", "entropy 0.9 h 2 min 0.1 s 0.2", True),
        ("mean loss 1.5 min loss 0.2", "mean loss 1.7 min loss 0.2", True),
        ("epoch took 3 min 12 s", "epoch took 4 min 31 s", False),
        ("took 1 h 3 min 12 s, loss 0.5", "took 2 h 4 min 31 s, loss 0.5", False),
        ("took 3 min, 4m 5s, 4m5s, 1h2m3s", "took 4 min, 5m 6s, 5m6s, 2h3m4s", False),
        ("took 12.1 s: loss 0.5", "took 13.2 s: loss 0.5", False),
        ("took 12.1 s loss 0.5", "took 13.2 s loss 0.5", False),
    ],
)
def test_a_printed_number_is_compared_to_its_last_digit_and_durations_are_not(
    first: str, second: str, differs: bool
) -> None:
    lines = [Line("prints", text, "train.py:1", inside=False) for text in (first, second)]
    assert _Near().unlike(*lines) == differs


@pytest.mark.parametrize(
    ("first", "second", "differs"),
    [
        ("the samples are positive", "the samples are negative", True),
        ("loss 0.5", "loss nan", True),
        ("better: True", "better: False", True),
        ("predicted [0, 1, 1]", "predicted [0, 1]", True),
        ("worst nothing", "nothing", True),
        ("[1. 2.] and  3", "[0.99999999 2.] and 3.", False),
        ("[ 9, 1.e-07]", "[9, 1.00000001e-07]", False),
        ("took 59 s at 950 KB", "took 1 min 2 s at 1.2 MiB", False),
        ("torch.Size([8, 3])", "torch.Size([4, 3])", False),
    ],
)
def test_printed_words_are_compared_but_for_shapes_and_durations(
    first: str, second: str, differs: bool
) -> None:
    lines = [Line("prints", text, "train.py:1", inside=False) for text in (first, second)]
    assert _Near().unlike(*lines) == differs


def _printed(*texts: str, at: str = "train.py:1", is_serial: bool = False) -> Run:
    printed: dict[str, list[Line]] = {}
    for text in texts:
        line = Line("prints", text, at, inside=False)
        printed.setdefault(line.place, []).append(line)
    return Run(1, 0, [[]], [{"serial": is_serial}], Path(), [printed])


@pytest.mark.parametrize(
    ("first", "other", "paired"),
    [
        (["0: ant", "1: ant", "2: bee"], ["0: cow", "1: ant", "2: ant"], [(0, 0), (1, 1), (2, 2)]),
        (["begins", "loss 1", "loss 2"], ["2 ranks", "begins", "loss 1", "loss 2"], [(0, 1), (1, 2), (2, 3)]),
        (["loss 1", "best", "loss 2", "best"], ["loss 1", "loss 2"], [(0, 0), (2, 1), (1, None)]),
        (["loss 1", "ends"], [], [(0, None)]),
        (["begins", "it is good"], ["2 ranks", "begins", "it is bad"], [(0, 1), (1, 2)]),
    ],
)
def test_lines_of_the_same_place_are_paired_in_their_order_and_one_that_is_missing_with_nothing(
    first: list[str], other: list[str], paired: list[tuple[int, int | None]]
) -> None:
    expected = [(first[a], "nothing" if b is None else other[b]) for a, b in paired]
    found = [(line.text, now.text) for _, line, now in _pairs(_printed(*first), _printed(*other))]
    assert [pair for pair in found if pair[0] != "nothing"] == expected


def test_lines_of_an_untouched_script_are_paired_with_those_of_other_places() -> None:
    first, other = _printed("best: ant", is_serial=True), _printed("best: bee", at="other.py:7")
    assert [(line.text, now.text) for _, line, now in _pairs(first, other)] == [("best: ant", "best: bee")]


def test_words_that_differ_between_two_equal_runs_are_not_compared_and_those_beside_them_are() -> None:
    near = _Near()
    near.learn(_printed("run red-fox: worst ant"), _printed("run sly-cat: worst ant"), math.inf)
    ((_, line, now),) = _pairs(_printed("run red-fox: worst ant"), _printed("run old-owl: worst ant"))
    assert not near.unlike(line, now)
    ((_, line, now),) = _pairs(_printed("run red-fox: worst ant"), _printed("run old-owl: worst bee"))
    assert near.unlike(line, now)
    near.learn(_printed("run red-fox: worst ant"), _printed("run"), math.inf)
    assert not near.unlike(line, now)


@pytest.mark.parametrize(("second", "is_reordered"), [("{'b', 'a'}", True), ("{'b', 'c'}", False)])
def test_the_same_words_in_another_order_may_be_those_of_a_set(second: str, is_reordered: bool) -> None:
    pairs = [*_pairs(_printed("{'a', 'b'}"), _printed(second))]
    assert _Near().has_another_order(pairs) == is_reordered


@pytest.mark.parametrize(
    ("first", "now", "is_said"),
    [
        ("loss 0.5", "loss 1.004", True),
        ("25 of 40", "50 of 40", True),
        ("loss 0.5 of 3", "loss 1.0 of 4", False),
        ("loss 0.5", "loss 0.9", False),
        ("loss 0.5", "loss 0.5", False),
    ],
)
def test_numbers_that_are_as_many_times_the_first_as_there_are_processes_are_told(
    first: str, now: str, is_said: bool
) -> None:
    lines = [Line("prints", text, "train.py:1", inside=False) for text in (first, now)]
    assert _is_times(2, *lines) == is_said


def test_where_rank_0_has_the_right_number_by_chance_that_of_another_rank_is_shown() -> None:
    def run(*texts: str) -> Run:
        lines = [Line("prints", text, "train.py:1", inside=False) for text in texts]
        return Run(len(texts), 0, [], [{}], Path(), [{line.place: [line]} for line in lines])

    own = _differing_between_ranks(run("rate 0.25"), run("rate 0.25", "rate 0.11"), _Near())
    assert own == {"prints rate #": ("rate 0.11", "rate 0.25")}


@pytest.mark.parametrize(
    ("verb", "others", "words"),
    [
        ("prints", 0, "outside of `if rank == 0`"),
        ("writes", 2, "each rank writes a file of this name"),
        ("prints", 2, "samestep.gather"),
    ],
)
def test_what_to_write_depends_on_the_ranks_that_print_the_line(verb: str, others: int, words: str) -> None:
    said = str(Printed("train.py:1", verb, "1", "2", False, False, others))
    endings = ("outside of `if rank == 0`", "each rank writes a file of this name")
    assert words in said
    assert [ending for ending in endings if ending in said] == [
        ending for ending in endings if ending == words
    ]


def test_a_name_of_digits_and_letters_is_one_word_and_a_duration_is_none():
    words = Line("prints", "run 12xy34 of 3e641a took 1h30m, loss 5e-3 of 100e10", "", False).words
    assert words == ("run", "12xy34", "of", "3e641a", "took", ",", "loss", "#", "of", "#")
