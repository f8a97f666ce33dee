"""`samestep verify` finds each of the planted mistakes, names its cause, and finds none where there is none."""

import json
import math
import re
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner, Result
from torch.utils.data import DataLoader

import samestep
from samestep.cli.output import print_json
from samestep.cli.verify import _document, command
from samestep.train.digest import digests
from samestep.train.loss import reduction_of
from samestep.verify.causes import stated
from samestep.verify.lines import Line
from samestep.verify.printed import _Near
from samestep.verify.read import Digest, Run, Step
from samestep.verify.record import wrap
from samestep.verify.record.recorder import Recorder, _scaled, _value
from samestep.verify.trajectory import Compared, Difference, first_fact, follow
from samestep.verify.verify import Report

pytestmark = pytest.mark.timeout(200)
SCRIPTS = Path(__file__).parents[1] / "scripts"
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # a failure's logs are kept


def _verify(*arguments: str) -> Result:
    return CliRunner().invoke(command, arguments)


def _last(result: Result) -> str:
    return result.stdout.splitlines()[-1]


@pytest.mark.long  # test_corpus tries the same search on forked ranks
def test_a_mistake_is_found_and_its_cause_named_with_its_line() -> None:
    result = _verify("-n", "1,2", str(SCRIPTS / "lr_by_ranks.py"))
    assert result.exit_code == 1, result.output
    assert _last(result).startswith(
        "different: step 1, lr; lr is 0.1 at 1 process and 0.2 at 2; every step has"
    )
    assert "(lr_by_ranks.py:18 reads world.size)" in _last(result)
    said = r"running 2 processes, with --same, with its rank hidden at lr_by_ranks.py:18 \(run \d+, about [\d.]+ s\)"
    assert re.search(said, result.stderr)


@pytest.mark.long
def test_what_is_printed_of_one_rank_has_an_exit_code_and_a_line_of_its_own() -> None:
    result = _verify("-n", "1,2", "--json", str(SCRIPTS / "share_accuracy.py"))
    report = json.loads(result.stdout)
    assert (result.exit_code, report["same"], report["verdict"]) == (3, False, "printed")
    assert (report["causes"], report["remarks"]) == ([], [])
    assert [found["line"] for found in report["printed"]] == ["share_accuracy.py:30"]
    assert report["printed"][0]["shown"].startswith("epoch 0: accuracy 0.")


@pytest.mark.slow
def test_a_mistake_that_ends_the_run_is_shown_in_the_words_of_the_run() -> None:
    result = _verify("-n", "1,2", str(SCRIPTS / "not_replicated.py"))
    assert result.exit_code == 1
    assert "SGD steps weight of Linear, which belongs to no replica" in result.output
    assert _last(result).startswith("the script failed at 2 processes; SGD steps weight of Linear")


@pytest.mark.slow
def test_a_sound_script_is_the_same_to_rounding_and_no_cause_is_named() -> None:
    script = str(SCRIPTS / "multi_task.py")
    result = _verify("-n", "1,3", "--json", "--steps", "4", script)
    report = json.loads(result.stdout)
    assert result.exit_code == 0, result.output
    assert (report["schema_version"], report["verdict"], report["cause"]) == (1, "rounding", None)
    assert [(row["size"], row["steps"], row["samples"]) for row in report["sizes"]] == [
        (size, 4, 4 * 8) for size in (1, 3)
    ]


@pytest.mark.long
def test_exact_steps_with_batchnorm_and_dropout_are_the_same_to_the_bit_and_checkpoints_are_left_alone() -> (
    None
):
    result = _verify("-n", "1,2", "--exact", str(Path(__file__).parent / "exact_script.py"))
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == "same to the bit"
    assert [*Path().iterdir()] == []


@pytest.mark.slow
def test_a_serial_script_is_shown_its_own_lines_to_change() -> None:
    script = EXAMPLES / "digits_serial.py"
    result = _verify("-n", "1,2", str(script))
    assert result.exit_code == 2
    assert "does not use samestep" in result.stderr
    assert (
        "-train = DataLoader(digits(args.data_dir, train=True), args.batch_size, shuffle=True)"
        in result.stdout
    )


@pytest.mark.slow
def test_a_script_that_cannot_be_verified_gets_a_sentence() -> None:
    Path("none.py").write_text("print(1)")
    for arguments, sentence in (
        (["-n", "1,2", "none.py"], "none.py took no optimizer step"),
        (["nowhere.py"], "there is no script 'nowhere.py' in "),
        (["-n", "1", "none.py"], "-n 1 is one number of processes"),
        (["-n", "one", "none.py"], "-n one is not a list of numbers"),
        (["-n", "1,0", "none.py"], "-n 1,0 contains 0 processes"),
    ):
        result = _verify(*arguments)
        assert result.exit_code == 2, result.output
        assert sentence in result.stderr


@pytest.mark.slow
def test_a_rank_that_leaves_without_its_facts_is_named() -> None:
    Path("leaves.py").write_text("import os\nif os.environ['RANK'] == '1':\n    os._exit(0)\n")
    result = _verify("-n", "2,1", "leaves.py")
    assert result.exit_code == 2, result.output
    assert "leaves.py left on rank 1 of 2 before its end could be recorded" in result.stderr


def test_the_scale_of_a_grad_scaler_is_no_part_of_the_loss() -> None:
    loss = torch.full((), 2.0, requires_grad=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    assert _value(_scaled(torch.amp.GradScaler.scale, scaler, loss), None) == 2.0


def test_a_median_that_noise_left_alone_by_chance_may_differ_as_much_as_the_numbers_beside_it() -> None:
    def printed(text: str) -> Run:
        return replace(_trained([0.0]), printed=[{"": [Line("prints", text, "train.py:1", inside=False)]}])

    first, near = printed("dice 0.81125 median 0.85567"), _Near()
    (median,) = printed("dice 0.81125 median 0.85769").printed[0][""]
    (other,) = printed("dice 0.81125 median 0.91").printed[0][""]
    (line,) = first.printed[0][""]
    assert near.unlike(line, median)
    near.learn(first, printed("dice 0.80918 median 0.85567"), 10.0, 3.0)
    assert not near.unlike(line, median)
    assert near.unlike(line, other)
    near.learn(first, printed("dice 0.1 median 0.85567"), 10.0, 3.0)
    assert near.unlike(line, other)  # a line that is all noise does not excuse everything in it


def _trained(distances: list[float], rate: float = 0.1) -> Run:
    steps = [
        Step(
            [{"loss": 1.0 + apart, "mine": 4, "all": 4, "samples": [0, 1, 2, 3], "forwards": []}],
            [{"lr": [rate if at else 0.1]}],
            {"w": Digest(1.0, 1.0 + apart, hash(apart))},
            {"w": Digest(1.0, 1.0, 0)},
            {},
        )
        for at, apart in enumerate(distances)
    ]
    return Run(1, 0, [steps], [{"precision": "float32"}], Path(), [{}])


@pytest.mark.parametrize(
    ("distances", "where"),
    [
        ([0.0, 0.0, 0.0], None),
        ([1e-7, 3e-7, 1e-6, 5e-6, 2e-5, 1e-4, 4e-4], None),
        ([1e-7, 1e-7, 1e-7, 1e-3, 1e-3], "step 4, loss"),
        ([0.0, 1e-2, 0.0], "step 2, loss"),
        ([1e-7, 2e-7], "step 3, number of steps"),
        ([0.0, math.nan, 0.0], "step 2, loss"),
    ],
)
def test_a_jump_is_a_difference_and_what_grows_by_little_is_rounding(
    distances: list[float], where: str | None
) -> None:
    path = follow(_trained([0.0] * max(3, len(distances))), _trained(distances))
    assert (str(path.difference) if path.difference else None) == where
    assert (path.bits is None) == (not any(distances))


def _on_ranks(*ranks: Run) -> Run:
    """The same run, of which each of these is a rank."""
    return replace(ranks[0], size=len(ranks), ranks=[rank.steps for rank in ranks])


@pytest.mark.parametrize(
    ("counts", "said", "cause"),
    [
        ((8, 0), "rank 1 took 0 steps and rank 0 8", "run the training loop on all ranks"),
        (
            (4, 8),
            "rank 0 took 4 steps and rank 1 8",
            "decide whether to step, and when to stop, from a value that is",
        ),
        ((8, 8, 9), "rank 0 took 8 steps and rank 2 9", "decide whether to step"),
        ((9, 1, 8), "rank 1 took 1 step and rank 0 9", "decide whether to step"),
    ],
)
def test_ranks_that_took_other_numbers_of_steps_are_named(
    counts: tuple[int, ...], said: str, cause: str
) -> None:
    first = _on_ranks(*[_trained([0.0] * 8)] * len(counts))
    other = _on_ranks(*(_trained([0.0] * count) for count in counts))
    found = Compared(first, other, first_fact(first, other))
    for compared in (follow(first, other), found, follow(other, other)):
        assert str(compared.difference) == said
        assert cause in str(stated(compared))


def test_a_step_more_on_one_rank_is_named_before_the_weights_it_drives_apart() -> None:
    first = _on_ranks(*[_trained([0.0] * 2)] * 2)
    other = _on_ranks(_trained([0.0, 1e-9, 0.0]), _trained([0.0, 0.0]))
    assert str(follow(first, other).difference) == "rank 1 took 2 steps and rank 0 3"
    other.ranks[0][1].parts.clear()  # a second optimizer's step has no batch of its own
    assert str(follow(first, other).difference) == "rank 1 took 2 steps and rank 0 3"


def test_the_last_loss_is_that_of_the_last_backward_where_two_optimizers_share_it() -> None:
    run = _trained([0.0, 1.0])
    run.steps[1].parts.clear()
    assert run.last_loss == 1.0
    run.steps[0].parts.clear()
    assert run.last_loss is None


def test_a_rate_is_compared_also_after_rounding_has_grown() -> None:
    first, other = _trained([0.0] * 3), _trained([0.0, 0.5, 0.5], rate=0.2)
    assert str(first_fact(first, other)) == "step 2, lr"
    assert first_fact(first, _trained([0.0, 0.5, 0.5])) is None


def test_a_closure_that_is_called_more_often_has_the_same_batch() -> None:
    def called(times: int) -> Run:
        run = _trained([0.0])
        (part,) = run.steps[0].parts
        return replace(run, ranks=[[replace(run.steps[0], parts=[part | {"turn": 1}] * times)]])

    assert first_fact(called(2), called(3)) is None


def test_a_rate_that_one_rank_has_alone_is_compared_too() -> None:
    first = _on_ranks(_trained([0.0] * 3), _trained([0.0] * 3))
    other = _on_ranks(_trained([0.0] * 3), _trained([0.0] * 3, rate=0.2))
    found = follow(first, other)
    assert str(found.difference) == "step 2, rank 1, lr"
    assert "lr is 0.1 on rank 0 and 0.2 on rank 1" in str(stated(found))


@pytest.mark.parametrize(
    ("loss", "count"),
    [
        (lambda x, y: F.cross_entropy(x, y), 8),
        (lambda x, y: F.cross_entropy(x, y, ignore_index=0) * 2, 6),
        (lambda x, y: F.cross_entropy(x, y, torch.tensor([1.0, 0.5, 2.0])), 9.5),
        (lambda x, y: F.cross_entropy(x, y, reduction="none").topk(3)[0].mean() / 4, 3),
        (lambda x, y: x[y > 0].sum() / (y > 0).sum(), 6),
        (lambda x, y: x.pow(2).mean(), 24),
        (lambda x, y: x.sum(), None),
    ],
)
def test_what_a_loss_is_divided_by_is_read_from_how_it_was_made(
    loss: Callable[..., torch.Tensor], count: float | None
) -> None:
    x, y = torch.randn(8, 3, requires_grad=True), torch.tensor([0, 0, 1, 1, 1, 2, 2, 2])
    assert reduction_of(loss(x, y))["count"] == count


def _with_gradients(*norms: float) -> Run:
    run = _trained([0.0])
    run.steps[0].grad.update({f"w{at}": Digest(norm, norm, hash(norm)) for at, norm in enumerate(norms)})
    return run


def test_each_tensor_is_judged_by_its_own_noise() -> None:
    assert follow(_with_gradients(1.0, 1e-9), _with_gradients(1.0, 5e-9)).difference is None
    first, other = _with_gradients(1e-3, 1e-5), _with_gradients(1e-3, 2e-5)
    assert str(follow(first, other).difference) == "step 1, gradient of w1"
    assert follow(first, other, nudged=_with_gradients(1e-3, 3e-5)).difference is None
    other = _with_gradients(2e-3, 1e-5)
    assert (
        str(follow(first, other, nudged=_with_gradients(1e-3, 3e-5)).difference) == "step 1, gradient of w0"
    )


def test_the_gradient_of_a_bias_whose_terms_cancel_out_is_rounded_by_these_terms() -> None:
    # as of a discriminator's bias: -0.5 of the real samples and 0.49 of the others, summed in another order
    first = _with_gradients(1.0, 0.01)
    assert follow(first, _with_gradients(1.0, 0.010001)).difference is None
    found = follow(first, _with_gradients(1.0, 0.01001))
    assert str(found.difference) == "step 1, gradient of w1"
    assert found.distance == pytest.approx(1e-3)  # of its own norm, by which it is judged


def test_as_many_times_the_gradients_as_ranks_is_never_noise() -> None:
    first, nudged = _with_gradients(1.0), _with_gradients(1.0)
    first.steps[0].grad.pop("w")
    nudged.steps[0].grad.pop("w")
    nudged.steps[0].grad["w0"] = Digest(1.0, -1.0, 1)  # the direction is noise, and the length is not
    for factor in (0.5, 2.0):
        other = replace(_with_gradients(factor), size=2)
        other.steps[0].grad.pop("w")
        assert str(follow(first, other, nudged).difference) == "step 1, gradient of w0"
    nudged.steps[0].grad["w0"] = Digest(9.0, 9.0, 1)
    assert follow(first, other, nudged).difference is None


def test_what_the_same_bits_need_is_said_where_they_are_asked_for() -> None:
    run = _trained([0.0])
    found = Compared(run, run, bits=Difference("loss", 0, None, "loss", 1e-7), largest=1e-7)
    report = Report({2: found}, wants_bits=True)
    assert str(report).startswith(
        "same to rounding: 1.0e-07, not the same bits: step 1, loss; the same bits need"
    )


def test_differences_that_are_noise_in_each_tensor_are_said_in_words() -> None:
    run = _trained([0.0])
    found = Compared(run, run, bits=Difference("loss", 0, None, "loss", 0.0))
    assert str(Report({2: found}, wants_bits=False)).startswith(
        "same to rounding: the first run from changed"
    )


def test_json_has_null_for_a_loss_that_is_not_finite(capsys: pytest.CaptureFixture[str]) -> None:
    runs = {1: _trained([math.nan]), 2: _on_ranks(_trained([]), _trained([]))}
    print_json(_document(Report({size: Compared(run, run) for size, run in runs.items()}, False)))
    assert [row["loss"] for row in json.loads(capsys.readouterr().out)["sizes"]] == [None, None]


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.complex64]
)
def test_a_digest_tells_one_changed_bit_and_how_far_two_tensors_are_apart(dtype: torch.dtype) -> None:
    tensor = torch.arange(1, 50).to(dtype)
    raw = tensor.clone().view(torch.uint8)
    raw[8] ^= 1
    (a, b), (empty,) = digests([tensor, raw.view(dtype)]), digests([tensor[:0]])
    assert a[2] != b[2]
    assert abs(a[0] - b[0]) <= float((tensor - raw.view(dtype)).abs().double().norm()) + 1e-12
    assert empty == (0.0, 0.0, 0)


def test_a_loader_of_samestep_is_not_recorded_as_one_of_the_scripts_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(tmp_path)
    monkeypatch.setattr(DataLoader, "__iter__", DataLoader.__iter__)
    wrap(DataLoader, "__iter__", recorder._iterate)
    assert len(list(samestep.loader([*range(8)], batch_size=4))) == 2
    assert recorder._foreign is None
    assert len(list(DataLoader([*range(8)], batch_size=4))) == 2
    assert str(recorder._foreign).startswith("a plain DataLoader (")
    recorder.finish()


@pytest.mark.long
def test_labels_in_the_order_of_a_set_are_named_as_what_each_process_has_of_its_own() -> None:
    Path("labels.py").write_text(
        "import torch, samestep\nfrom torch import nn\ntorch.manual_seed(0)\nsamestep.init()\n"
        "classes = [*{f'class {number}' for number in range(7)}]\n"
        "data = [(torch.randn(6), classes.index(f'class {at % 7}')) for at in range(24)]\n"
        "model = samestep.replicate(nn.Linear(6, 7))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for x, y in samestep.loader(data, 8):\n"
        "    optimizer.zero_grad()\n"
        "    nn.functional.cross_entropy(model(x), y).backward()\n"
        "    optimizer.step()\n"
    )
    result = _verify("-n", "1,2", "labels.py")
    assert result.exit_code == 1, result.output
    assert "the order of a set of them, is another in each process" in _last(result)
