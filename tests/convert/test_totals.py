"""`samestep convert` makes shown objects, and predictions of a pass, those of the whole batch or data set."""

import re

import pytest
from convert.test_convert import BEGIN, EVALUATE, METER, STEP, _after, _of, _place  # noqa: F401

from samestep.convert.convert import convert


@pytest.mark.parametrize("name", ["__str__", "__repr__", "__format__"])
@pytest.mark.parametrize(
    "line",
    ["print(meter)", "print('{}'.format(meter))", "print('%s' % meter)", "print([meter])", "vars(meter)"],
)
def test_a_meter_that_is_only_shown_is_filled_with_the_whole_batch(name, line):
    meter = METER.replace("__str__(self)", f"{name}(self, spec='')")
    line = "print(vars(meter))" if line == "vars(meter)" else line
    made = _after(f"{BEGIN}{meter}for x, y in train:\n{STEP}    meter.update(loss.item(), len(x))\n{line}\n")
    assert "meter.update(samestep.mean(loss.item()), samestep.sum(len(x)))" in made


@pytest.mark.parametrize(
    ("lines", "becomes"),
    [
        (
            "print((torch.cat(got) == labels).sum())",
            "print((samestep.gather(torch.cat(got)) == labels).sum())",
        ),
        ("got = torch.cat(got)\nprint(got.eq(labels).sum())", "print(samestep.gather(got).eq(labels).sum())"),
        ("got = torch.cat(got)\nprint(F.mse_loss(got, labels))", "F.mse_loss(samestep.gather(got), labels))"),
        (
            "got = torch.cat(got)\nprint(nn.MSELoss()(got, labels))",
            "nn.MSELoss()(samestep.gather(got), labels))",
        ),
        ("got = torch.cat(got)\nprint((got - 2).mean())", "print(samestep.mean((got - 2).mean()))"),
    ],
)
def test_predictions_of_a_pass_beside_the_targets_of_all_samples_are_those_of_all_ranks(lines, becomes):
    text = f"{BEGIN}labels, got = data.tensors[1], []\n{EVALUATE}        got.append(out.argmax(1))\n{lines}\n"
    assert becomes in _after(text)


def test_a_function_that_gets_shares_and_the_predictions_of_all_samples_is_listed():
    text = (
        f"{BEGIN}labels, got = data.tensors[1], []\ndef same(a, b):\n    return (a == b).float().mean()\n"
        f"for x, y in train:\n{STEP}    print(same(model(x).argmax(1), y))\n"
        f"{EVALUATE}        got.append(out.argmax(1))\nprint(same(torch.cat(got), labels))\n"
    )
    (note,) = _of(text).notes
    assert "reached with numbers of a share" in note
    assert "every process takes all of it" in note


def test_what_has_no_total_is_named_by_its_own_line_as_it_is_after_the_patch():
    train = f"total = n = 0\nfor x, y in train:\n{STEP}    total += loss.item() * len(x)\n    n += len(x)\n"
    test = "worst = 0.0\nfor x, y in test:\n    worst = max(worst, model(x).max().item())\n"
    text = f"{BEGIN}{train}{test}print(f'{{total / n}} {{worst}}')\n"
    (path,) = _of(text).files
    for is_written in (False, True):
        found = convert(path, is_written)
        (note,) = found.notes
        lines = found.files[path][is_written].decode().splitlines()
        loader, cause = (lines[int(at) - 1] for at in re.findall(r"train\.py:(\d+): ", note))
        assert loader == "test = DataLoader(data, batch_size=8)"
        assert cause.strip() == "worst = max(worst, model(x).max().item())"
    assert "`max(worst, model(x).max().item())` is max(...) of this rank's values" in note
