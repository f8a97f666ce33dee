"""The judge of `make convert-corpus` sees a difference wherever one is."""

import math
from typing import Any

import pytest
import torch
from convert import corpus

FILE = {"weight": torch.ones(2), "loss": 1.0, "steps": [1, 2], "net": torch.nn.Linear(1, 1)}
OTHER = [
    ("1.0000 in step 7", {"weight": torch.ones(2)}),
    ("1.0000 in step 7", FILE | {"weight": torch.tensor([1.0, math.nan])}),
    ("1.0000 in step 7", FILE | {"weight": torch.ones(2, 1)}),
    ("1.0000 in step 7", FILE | {"loss": math.nan}),
    ("1.0000 in step 7", FILE | {"loss": math.inf}),
    ("1.0000 in step 7", FILE | {"steps": [1, 2, 3]}),
    ("1.0000 in step 7", FILE | {"net": torch.nn.Linear(1, 1)}),
    ("nan in step 7", FILE),
    ("inf in step 7", FILE),
    ("1.0200 in step 7", FILE),
    ("1.0000 in step 8", FILE),
    ("1.0000 in step 7\nand 8", FILE),
]


@pytest.mark.parametrize(("printed", "file"), OTHER, ids=range(len(OTHER)))
def test_another_number_shape_or_length_is_a_difference_either_way(
    printed: str, file: dict[str, Any]
) -> None:
    runs = corpus.Ran("1.0000 in step 7", {"last.pt": FILE}), corpus.Ran(printed, {"last.pt": file})
    assert corpus.difference(*runs)
    assert corpus.difference(*reversed(runs))


def test_rounding_is_no_difference() -> None:
    close = FILE | {"weight": torch.ones(2) + 1e-6, "loss": 1.000001}
    untouched = corpus.Ran("1.0000 in step 7", {"last.pt": FILE})
    assert corpus.difference(corpus.Ran("1.0001 in step 7", {"last.pt": close}), untouched) == ""
