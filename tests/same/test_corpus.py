"""Scripts in the shapes that users write give the untouched script's numbers at any number of processes."""

import math
import os
import re

import pytest
import torch
from same import corpus

LONG = bool(os.environ.get("LONG"))
SIZES = (2, 3, 5)
# what each guards: recomputed draws, a batch merged behind the sequence, dimensions of equal size beside a
# BatchNorm, sizes given as numbers, noise in the loop, what a recurrent layer returns of one sample, what all
# gathered, packed sequences, a collate_fn that pads, ranks with one graph, sampled actions, an evaluation, batches
# that are not the latest, a share of one sample with the time in front, derivatives of gradients, empty draws, an
# evaluation that calls backward(), padding beside what is laid end to end, a collate_fn that draws, two views in
# one call, sizes that are a share's by chance, also of older noise, several particles for each sample, samples one by
# one, distributions that are as long as a share by chance, a stream that draws its order, packed sequences beside
# labels of the whole batch's length, and in a last batch of one sample, labels of a pass of their own, an iterator that
# is older than the model, sizes that only the line of a draw tells
SAMPLE = {
    "checkpointed": (2,),
    "encoder_sequence_first": (2, 3),
    "conv1d": (2, 3),
    "class_token": (2,),
    "mixup": (3,),
    "lstm_batch_first": (5,),
    "gathered": (2,),
    "lstm_packed": (2, 3),
    "padded_text": (3,),
    "graphs_end_to_end": (5,),
    "reinforce": (3,),
    "vae": (2,),
    "unlike_loaders": (3,),
    "collected": (2,),
    "seq2seq": (5,),
    "maml": (3,),
    "maml_loop": (2, 3),
    "maml_tasks": (3,),
    "slopes_by_sample": (3,),
    "wgan_gp_norm": (2,),
    "vqvae": (2,),
    "adversarial": (2,),
    "speech": (3,),
    "masked_words": (2, 3),
    "views_end_to_end": (2,),
    "shown_in_loop": (3,),
    "shown_before": (2,),
    "real_and_fake": (2, 3),
    "particles": (3,),
    "one_at_a_time": (2,),
    "one_left": (2,),
    "packed_evaluation": (2, 3),
    "named_entities": (2, 3),
    "stream_shuffled": (2, 3),
    "labels_apart": (3,),
    "begun_before_model": (3,),
    "sized_by_line": (2, 3),
}
CASES = dict.fromkeys(sorted(corpus.SCRIPTS), SIZES) if LONG else SAMPLE
# these take longest at one of their sizes
_SLOW = {
    "adversarial",
    "checkpointed",
    "class_token",
    "conv1d",
    "encoder_sequence_first",
    "graphs_end_to_end",
    "lstm_batch_first",
    "lstm_packed",
    "maml_loop",
    "maml_tasks",
    "one_left",
    "packed_evaluation",
    "real_and_fake",
    "seq2seq",
    "speech",
    "unlike_loaders",
    "views_end_to_end",
    "vqvae",
    "wgan_gp_norm",
}
# bfloat16 keeps 8 bits, and rounds sums of other parts otherwise
TOLERANCE = {"amp": 1e-2}


@pytest.fixture(scope="module")
def untouched(nest, tmp_path_factory):
    """What the untouched script does, run once for all sizes."""
    done = {}

    def ran(name):
        if name not in done:
            home = tmp_path_factory.mktemp("serial") / name
            done[name] = corpus.run(nest, corpus.SCRIPTS[name], 0, home)
        return done[name]

    return ran


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in _SLOW)) for name in CASES]
)
def test_a_converted_script_has_the_bits_of_the_untouched_one_at_one_process(name, untouched, nest, tmp_path):
    assert corpus.run(nest, corpus.SCRIPTS[name], 1, tmp_path / name).has_bits_of(untouched(name))


@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param(name, size, marks=[pytest.mark.slow] * (name in _SLOW))
        for name, sizes in CASES.items()
        for size in sizes
    ],
)
def test_a_converted_script_has_the_untouched_ones_numbers(name, size, untouched, nest, tmp_path):
    found = corpus.run(nest, corpus.SCRIPTS[name], size, tmp_path / name)
    assert found.difference(untouched(name)) <= TOLERANCE.get(name, 1e-6)
    assert "serial script" not in re.sub(".*before a BatchNorm.*", "", found.complained)


@pytest.mark.parametrize(
    ("printed", "weights"),
    [
        ("loss nan", {"weight": torch.ones(2)}),
        ("loss inf", {"weight": torch.ones(2)}),
        ("accuracy 1.0", {"weight": torch.ones(2)}),
        ("loss 1.0", {"weight": torch.tensor([1.0, math.nan])}),
        ("loss 1.0", {"weight": torch.ones(2, 1)}),
        ("loss 1.0", {}),
    ],
    ids=str,
)
def test_what_is_no_number_or_of_another_shape_is_infinitely_far_apart(printed, weights):
    """The judge of the tests above."""
    outcomes = corpus.Outcome("loss 1.0", "", {"weight": torch.ones(2)}), corpus.Outcome(printed, "", weights)
    for found, untouched in (outcomes, outcomes[::-1]):
        assert found.difference(untouched) == math.inf
        assert not found.has_bits_of(untouched)


def test_without_same_the_numbers_are_others(untouched, nest, tmp_path):
    """The control: dropout would show."""
    script = tmp_path / "mnist_cnn.py"
    script.write_text(corpus.SCRIPTS["mnist_cnn"].read_text().replace("same=True", "same=False"))
    assert corpus.run(nest, script, 2, tmp_path / "home").difference(untouched("mnist_cnn")) > 1e-3
