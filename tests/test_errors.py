"""Errors carry their facts, also from one process to another."""

import pickle

import cloudpickle
import pytest

from samestep.errors import (
    CheckpointError,
    PlacementError,
    RankMissing,
    RanksDiffer,
    UsageError,
    WorkerFailed,
)

ERRORS = [
    RankMissing("rank 2 did not come", ranks=[2], call="samestep.sum (train.py:29)"),
    RanksDiffer("ranks 0, 1 differ", ranks=(0, 1)),
    WorkerFailed("rank 3 died", rank=3, code=-9),
    CheckpointError("torn", path="/runs/000001"),
    PlacementError("RANK is 4", variable="RANK"),
    UsageError("no"),
    RankMissing(),
]


@pytest.mark.parametrize("pickler", [pickle, cloudpickle])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_keeps_its_message_and_facts_from_process_to_process(error, pickler):
    same = pickler.loads(pickler.dumps(error))
    assert (type(same), same.args, vars(same)) == (type(error), error.args, vars(error))


def test_an_error_raised_with_a_message_alone_has_no_facts():
    assert vars(CheckpointError("torn")) == {"path": None}
    assert vars(RankMissing("late")) == {"ranks": (), "call": None}
    assert isinstance(PlacementError("x"), ValueError)
