"""compare() finds what differs between two states, measures it, and calls nothing the same that is not."""

import math
import random

import pytest
import torch
from torch import nn

from samestep.compare.compare import compare
from samestep.train import streams


def _net() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2)).state_dict()


def _flipped(tensor: torch.Tensor, bit: int) -> torch.Tensor:
    raw = tensor.clone().view(torch.uint8)
    raw[bit // 8] ^= 1 << bit % 8
    return raw.view(tensor.dtype)


DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.complex64, torch.complex128, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32),
    *(torch.int64, torch.uint16, torch.uint32, torch.uint64, torch.float4_e2m1fn_x2),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_flipped_bit_is_found_in_every_dtype(dtype: torch.dtype) -> None:
    tensor = torch.ones(48, dtype=torch.uint8).view(dtype)
    assert compare({"w": tensor}, {"w": tensor.clone()}).verdict == "same"
    found = compare({"w": tensor}, {"w": _flipped(tensor, 64)}).differences[0]
    assert found is not None
    assert (found.name, found.kind, found.elements, found.bits) == ("w", "value", 1, 1)
    assert found.absolute > 0


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (2, 3), (1 << 20,), ((1 << 20) + 1,)])
def test_a_tensor_of_any_shape_is_the_same_as_itself(shape: tuple[int, ...]) -> None:
    tensor = torch.full(shape, 1.5)
    assert compare({"w": tensor}, {"w": tensor.clone()}).verdict == "same"


@pytest.mark.parametrize("place", [0, (1 << 20) - 1, 1 << 20, (1 << 21) + 6])
def test_a_difference_is_found_at_every_piece_of_a_large_tensor(place: int) -> None:
    a = torch.zeros((1 << 21) + 7)
    b = a.clone()
    b[place] = 2
    worst = compare({"w": a}, {"w": b}).worst
    assert worst is not None
    assert (worst.elements, worst.absolute, worst.relative) == (1, 2, 1)


@pytest.mark.parametrize(
    ("a", "b", "verdict", "absolute", "relative"),
    [
        (torch.tensor([1.0, 4.0]), torch.tensor([1.0, 5.0]), "different", 1, 0.2),
        (torch.tensor([-8.0, 1e-9]), torch.tensor([-8.0, 3e-9]), "rounding", 2e-9, 2.5e-10),
        (torch.tensor([3 + 4j]), torch.tensor([0j]), "different", 5, 1),
        (torch.tensor([1.0, math.inf]), torch.tensor([1.0, math.inf]), "same", None, None),
        (torch.tensor([math.inf]), torch.tensor([-math.inf]), "different", math.inf, math.inf),
        (torch.tensor([1.0, math.nan]), torch.tensor([1.0, 2.0]), "different", math.inf, math.inf),
        (torch.tensor([True, False]), torch.tensor([True, True]), "different", 1, 1),
        (torch.tensor([2**62]), torch.tensor([2**62 + 1]), "different", 1, 2.0**-62),
        (0.001, 0.01, "different", 0.009, 0.9),
        (0.1 + 0.2, 0.3, "rounding", 5.6e-17, 1.9e-16),
        (3, 4, "different", 1, 0.25),
        ((0.9, 0.999), (0.9, 0.99), "different", 0.009, 0.009009),
        ("adam", "sgd", "different", math.inf, math.inf),
        (None, 1.0, "different", math.inf, math.inf),
        (None, None, "same", None, None),
        (2**80, 2**80, "same", None, None),
        (2**80, 2**80 + 1, "different", math.inf, math.inf),
    ],
)
def test_a_difference_is_measured_absolutely_and_against_the_largest_value(
    a: object, b: object, verdict: str, absolute: float | None, relative: float | None
) -> None:
    found = compare({"w": a}, {"w": b})
    assert found.verdict == verdict
    measured = [found.worst.absolute, found.worst.relative] if found.worst else None
    assert measured == (None if absolute is None else pytest.approx([absolute, relative], rel=0.02))


def test_nan_at_the_same_place_is_equal() -> None:
    a = torch.tensor([math.nan, 1.0])
    other_payload = torch.tensor([0x7FC00001, 0x3F800000], dtype=torch.int32).view(torch.float32)
    for b in (a.clone(), other_payload):
        assert compare({"w": a}, {"w": b}).equal


def test_nan_on_one_side_is_named_nan() -> None:
    found = compare({"w": torch.tensor([math.nan, 1.0])}, {"w": torch.ones(2)})
    assert str(found) == "different: 1 of 1 tensors, w (relative NaN)"


def test_the_sign_of_zero_is_a_difference_in_bits_only() -> None:
    a, b = {"w": torch.tensor([0.0, 1.0])}, {"w": torch.tensor([-0.0, 1.0])}
    assert str(compare(a, b)) == "same values, not the same bits: the sign of zero differs in w"
    assert not compare(a, b).equal
    assert compare(a, b, tolerance=0).equal


@pytest.mark.parametrize(
    ("factor", "dtype", "verdict"),
    [
        (1 + 1e-6, torch.float32, "rounding"),
        (1 + 1e-4, torch.float32, "different"),
        (1 + 1e-13, torch.float64, "rounding"),
        (1 + 1e-6, torch.float64, "different"),
        (1 + 1e-2, torch.bfloat16, "rounding"),
        (1 + 1e-1, torch.bfloat16, "different"),
    ],
)
def test_what_counts_as_rounding_depends_on_the_dtype(
    factor: float, dtype: torch.dtype, verdict: str
) -> None:
    a = torch.linspace(1, 2, 99, dtype=torch.float64)
    assert compare({"w": a.to(dtype)}, {"w": (a * factor).to(dtype)}).verdict == verdict


def test_a_tolerance_is_for_numbers_that_round_and_not_for_counters() -> None:
    a = {"w": torch.tensor([1.0, 2.0]), "step": torch.tensor(1000)}
    near = {"w": torch.tensor([1.0, 2.001]), "step": torch.tensor(1000)}
    later = {"w": torch.tensor([1.0, 2.0]), "step": torch.tensor(1001)}
    assert compare(a, near, tolerance=1e-3).equal
    assert (
        str(compare(a, near, tolerance=1e-3)) == "same within 0.001: largest relative difference 5.0e-04 in w"
    )
    assert not compare(a, near, tolerance=1e-4).equal
    assert not compare(a, later, tolerance=0.5).equal


def test_another_dtype_is_a_difference_whose_values_are_compared() -> None:
    weight = torch.tensor([1.0, 0.1])
    found = compare({"w": weight}, {"w": weight.bfloat16()})
    assert str(found) == "different: 1 of another dtype (w)"
    assert (found.differences[0].a, found.differences[0].b, found.differences[0].elements) == (
        "float32",
        "bfloat16",
        1,
    )
    assert compare({"w": weight}, {"w": weight.bfloat16()}, tolerance=1e-2).equal
    assert compare({"w": weight}, {"w": weight.double()}).verdict == "different"


def test_a_packed_dtype_is_not_taken_for_its_bytes() -> None:
    raw = torch.ones(4, dtype=torch.uint8)
    assert str(compare({"w": raw.view(torch.float4_e2m1fn_x2)}, {"w": raw})) == (
        "different: 1 of another dtype (w)"
    )


def test_a_single_number_is_shown_as_it_is() -> None:
    assert str(compare({"w": torch.tensor([0.5])}, {"w": torch.tensor([0.75])})) == (
        "different: 1 of 1 tensors, w (0.5 and 0.75)"
    )


def test_a_name_from_a_file_cannot_steer_the_terminal() -> None:
    assert "\x1b" not in str(compare({"\x1b[2J": {"w\n": 1}}, {"\x1b[2J": {"w\n": 2}}))


def test_what_is_missing_or_of_another_shape_is_named_with_its_side() -> None:
    a = {"x": torch.ones(2), "only.a": torch.ones(1), "y": torch.ones(3)}
    b = {"y": torch.ones(3), "x": torch.ones(2, 1), "only.b": torch.ones(1), "only.c": torch.ones(1)}
    assert str(compare(a, b, tolerance=1e9)) == (
        "different: 1 of another shape (x); 1 only in A (only.a); 2 only in B (only.b and 1 more)"
    )
    assert [d.name for d in compare(a, b).differences] == ["x", "only.a", "only.b", "only.c"]
    assert "only in rank 1" in str(compare(a, b, names=("rank 0", "rank 1")))


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_what_wrapped_the_model_does_not_matter_and_is_said_once(prefix: str) -> None:
    wrapped = {prefix + name: tensor for name, tensor in _net().items()}
    found = compare({"model": _net()}, {"model": wrapped})
    assert found.verdict == "same"
    assert len(found.notes) == 1
    assert all(part in found.notes[0] for part in prefix.split(".") if part)


def test_a_name_is_never_lost_under_another() -> None:
    a = {"module.w": torch.ones(1), "w": torch.zeros(1)}
    b = {"module.w": torch.zeros(1), "w": torch.zeros(1)}
    assert compare(a, a).verdict == "same"
    assert [d.name for d in compare(a, b).differences] == ["module.w"]


@pytest.mark.parametrize(
    ("a", "b", "names"),
    [
        ({1: 0.0, "1": 1.0}, {"1": 1.0, 1: 5.0}, ["[1]"]),
        ({"a.b": 1, "a": {"b": 2}}, {"a": {"b": 3}, "a.b": 1}, ["['a']['b']"]),
        ({"": 1, "value": 2}, {"": 1, "value": 3}, ["['value']"]),
        ({"m": {"module.x": 1, 2: 0, "2": 0}}, {"m": {"x": 1, 2: 0, "2": 4}}, ["['m']['2']"]),
    ],
)
def test_names_that_dots_cannot_tell_apart_are_told_by_their_keys(
    a: object, b: object, names: list[str]
) -> None:
    assert compare(a, a).verdict == "same"
    found = compare(a, b)
    assert [(d.name, d.layer) for d in found.differences] == [(name, "") for name in names]


def test_values_that_nothing_tells_apart_are_refused() -> None:
    with pytest.raises(ValueError, match=r"two values are named \[nan\]"):
        compare({float("nan"): 1, math.nan: 2}, {})


@pytest.mark.parametrize(
    ("a", "b", "verdict"),
    [
        ([math.nan, "a"], [float("nan"), "a"], "same"),
        ((math.nan, None, 2**80), (float("nan"), None, 2**80), "same"),
        ([math.nan, "a"], [1.0, "a"], "different"),
        ([math.nan, "a"], ["a", math.nan], "different"),
        ([1, "a"], [True, "a"], "different"),
        ([1, "a"], [1, "a", "b"], "different"),
        ([1, "a"], [1, 2], "different"),
        ([0.0, "a"], [-0.0, "a"], "different"),
    ],
)
def test_a_list_of_values_is_compared_value_by_value(a: object, b: object, verdict: str) -> None:
    assert compare({"w": a}, {"w": b}).verdict == verdict


def test_a_checkpoint_is_compared_with_the_bare_weights_in_it() -> None:
    whole = {"epoch": 3, "model": _net(), "optimizer": {"state": {}}}
    for a, b in ((whole, _net()), (_net(), whole)):
        found = compare(a, b)
        assert found.verdict == "same"
        assert any("only `model.` is compared" in note for note in found.notes)


def test_the_state_of_an_optimizer_is_compared_by_dotted_names() -> None:
    states = []
    for lr in (0.1, 0.2):
        parameter = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.AdamW([parameter], lr=lr)
        parameter.grad = torch.ones(3)
        optimizer.step()
        states.append({"optimizer": optimizer.state_dict()})
    found = compare(*states)
    assert [(d.name, d.a, d.b) for d in found.differences] == [("optimizer.param_groups.0.lr", "0.1", "0.2")]
    assert compare(states[0], states[0]).contents.startswith("3 tensors and ")


def test_batchnorm_statistics_alone_are_recognised_and_explained() -> None:
    a, b = _net(), _net()
    b["1.running_mean"] += 1
    b["1.num_batches_tracked"] += 1
    found = compare(a, b)
    assert "only BatchNorm statistics, 2 of 9 tensors" in str(found)
    assert found.cause is not None
    assert "sync_batchnorm=True" in found.cause
    b["2.weight"] += 1
    assert compare(a, b).cause is None


def test_first_is_in_the_order_of_the_file_and_worst_by_size() -> None:
    a = {name: torch.ones(2) for name in "wxyz"}
    b = a | {"x": torch.tensor([1.0, 1.1]), "y": torch.tensor([1.0, 9.0])}
    found = compare(a, b)
    assert found.worst is not None
    assert (found.differences[0].name, found.worst.name) == ("x", "y")


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.ones(6)[::2],
        torch.ones(1).expand(5),
        torch.ones(3, 3).to_sparse(),
        torch.tensor([1 + 2j]).conj(),
        nn.Parameter(torch.ones(2)),
    ],
    ids=["channels_last", "strided", "expanded", "sparse", "conjugate", "parameter"],
)
def test_how_a_tensor_lies_in_memory_does_not_matter(tensor: torch.Tensor) -> None:
    plain = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach().resolve_conj().contiguous()
    assert compare({"w": tensor}, {"w": plain}).verdict == "same"
    assert compare({"w": tensor}, {"w": plain + 1}).verdict == "different"


def test_a_difference_is_symmetric() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(1000), torch.randn(1000)
    forth, back = compare({"w": a}, {"w": b}).worst, compare({"w": b}, {"w": a}).worst
    assert forth is not None
    assert back is not None
    assert (forth.absolute, forth.relative, forth.bits) == (back.absolute, back.relative, back.bits)


def test_a_random_stream_of_a_checkpoint_is_named() -> None:
    torch.manual_seed(0)
    random.seed(0)
    before = streams.capture()
    assert compare({"streams": [before]}, {"streams": [before]}).verdict == "same"
    random.random()
    (found,) = compare({"streams": [before]}, {"streams": [streams.capture()]}).differences
    assert found.name == "streams.0.python"


def test_a_plain_number_is_judged_as_the_tensors_that_it_was_computed_from():
    def verdict(dtype, other):
        weights = torch.ones(3, dtype=dtype)
        return compare({"w": weights, "best": 0.40556887}, {"w": weights, "best": other}).verdict

    assert verdict(torch.float32, 0.40556888) == "rounding"
    assert verdict(torch.float64, 0.40556888) == "different"
    assert verdict(torch.float32, 0.4056) == "different"
