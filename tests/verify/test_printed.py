"""Which printed lines count as different."""

import pytest

from samestep.verify.printed import _Near
from samestep.verify.read import Line


@pytest.mark.parametrize(
    ("first", "second", "differs"),
    [
        ("accuracy 97.22%", "accuracy 32.50%", True),
        ("epoch 3, loss 0.1234", "epoch 3, loss 0.1235", False),
        ("loss 1.2e-3", "loss 4.1e-4", True),
        ("took 12.31 s, 4000 images/s", "took 7.22 s, 9000 images/s", False),
        ("correct 350", "correct 175", True),
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
    assert _Near().unlike("", *lines) == differs
