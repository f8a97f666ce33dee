"""Tensors are found and changed wherever they lie, in values that keep their own types."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace

import pytest
import torch

from samestep.train.nested import map_tensors, named_tensors

Pair = namedtuple("Pair", "left right")
ONE = torch.ones(2)


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    name: str = "kept"


class Movable:
    def to(self, device):
        return f"moved to {device}"


def doubled(value, **options):
    return map_tensors(lambda tensor: tensor * 2, value, **options)


@pytest.mark.parametrize(
    ("value", "inner"),
    [
        ([ONE, 3], lambda found: found[0]),
        ((ONE, "text"), lambda found: found[0]),
        (Pair(ONE, None), lambda found: found.left),
        ({"x": ONE, "n": 1}, lambda found: found["x"]),
        (OrderedDict(x=ONE), lambda found: found["x"]),
        (Frozen(ONE), lambda found: found.x),
        ({"deep": [(Pair(1, {"x": ONE}),)]}, lambda found: found["deep"][0][0].right["x"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_tensors_are_changed_and_the_value_keeps_its_type(value, inner):
    found = doubled(value)
    assert type(found) is type(value)
    assert inner(found).tolist() == [2.0, 2.0]
    assert inner(value).tolist() == [1.0, 1.0]


def test_what_is_no_tensor_stays_as_it_is():
    for value in (None, 3, "text", Frozen, {1, 2}, SimpleNamespace(x=ONE)):
        assert doubled(value) is value
    assert doubled(Frozen(ONE)).name == "kept"


def test_an_object_with_a_method_to_is_one_tensor_where_it_is_to_be_moved():
    def moved(value, **options):
        return map_tensors(lambda tensor: tensor.to("there"), value, **options)

    assert moved([Movable()], movable=True) == ["moved to there"]
    assert moved({"x": (Movable(),)}, movable=True) == {"x": ("moved to there",)}
    assert moved(Pair(Movable(), 1), movable=True) == Pair("moved to there", 1)
    held = moved(Frozen(Movable()), movable=True)
    assert held.x == "moved to there"
    other = Movable()
    assert moved([other]) == [other]
    assert moved([Movable], movable=True) == [Movable]


def names(value):
    return [name for name, tensor in named_tensors(value) if tensor is ONE]


def test_every_tensor_has_the_name_of_its_place():
    assert names(ONE) == [""]
    assert names([0, ONE, (ONE,)]) == [".1", ".2.0"]
    assert names({"x": ONE, "more": {"y": ONE}}) == [".x", ".more.y"]
    assert names(MappingProxyType({"x": ONE})) == [".x"]
    assert names(SimpleNamespace(x=ONE, rows=[ONE])) == [".x", ".rows.0"]


def test_models_types_and_what_lies_deeper_than_six_are_not_looked_into():
    layer = torch.nn.Linear(1, 1)
    assert list(named_tensors([layer, type(layer), 3, "text"])) == []
    assert names([[[[[[ONE]]]]]]) == [".0.0.0.0.0.0"]
    assert names([[[[[[[ONE]]]]]]]) == []
    # an object counts twice, as its names are a dict
    assert names({"a": SimpleNamespace(b=({"c": [ONE]},))}) == [".a.b.0.c.0"]
    assert names({"a": SimpleNamespace(b=({"c": [[ONE]]},))}) == []
