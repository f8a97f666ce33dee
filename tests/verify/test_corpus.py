"""Each script of tests/scripts gets the verdict that it declares, all its causes, and no other."""

import os
import tempfile
from pathlib import Path

import pytest
from forked import Nest
from verify import corpus

LONG = bool(os.environ.get("LONG"))
SAMPLE = [
    "averaged_by_hand",
    "by_hand",
    "data_of_each_epoch",
    "key_bias",
    "lr_by_ranks",
    "negative_words",
    "noisy_gradients",
    "replay_of_rank",
    "saved_of_share",
    "sum_and_centered",
    "three_mistakes",
    "unseeded_split",
    "words_of_process",
    "words_of_share",
]
NAMES = sorted(path.stem for path in corpus.HOME.glob("*.py")) if LONG else SAMPLE


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", NAMES)
def test_a_script_gets_the_verdict_and_the_causes_that_it_declares(
    name: str, nest: Nest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # a failure's logs are kept
    script = corpus.HOME / f"{name}.py"
    report = corpus.verified(script, nest)
    assert corpus.objections(script, report) == [], report


def test_every_script_of_the_corpus_declares_its_verdict_and_half_of_them_a_mistake() -> None:
    declared = [corpus.expected(path) for path in corpus.HOME.glob("*.py")]
    assert {asked.verdict for asked in declared} == {
        "same",
        "with_same",
        "printed",
        "different",
        "failed",
        "refused",
    }
    assert len(declared) >= 90
    assert sum(bool(asked.cause or asked.printed) for asked in declared) >= 45
