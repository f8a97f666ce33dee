"""A batch of the script's own collate_fn is cut from the whole batch where it has rows, and else says where it lies."""

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from samestep.train.data.collated import Collated
from samestep.train.passes import Ragged, Rows

SAMPLES = [torch.arange(2.0), torch.arange(3.0) + 10, torch.arange(7.0) + 20]
MINE = slice(1, 2)


def test_what_is_alike_for_every_batch_leaves_the_rest_to_be_cut_from_the_whole_batch():
    weights = torch.tensor([0.5, 2.0])
    collate = Collated(lambda samples: (pad_sequence(samples, batch_first=True), weights))
    (padded, found), ragged = collate((SAMPLES, MINE))
    assert torch.equal(padded, pad_sequence(SAMPLES, batch_first=True)[MINE])
    assert torch.equal(found, weights)
    assert ragged == {}


def test_what_lies_end_to_end_is_found_behind_a_tensor_that_has_other_dimensions_in_a_share():
    collate = Collated(
        lambda samples: {
            "sums": torch.stack([sample[:2] for sample in samples]).squeeze(0),
            "nodes": torch.cat(samples),
        }
    )
    batch, ragged = collate((SAMPLES, MINE))
    assert torch.equal(batch["nodes"], SAMPLES[1])
    assert ragged == {".nodes": Ragged(0, Rows(3, 2, 12))}


def test_a_pair_of_tensors_with_the_time_in_front_is_no_list_of_two_samples():
    """The batch has two samples too, and so has the time of one of its tensors."""

    def collate(samples):
        return torch.stack([x for x, _ in samples], 1), torch.stack([y for _, y in samples], 1)

    samples = [(torch.rand(5, 3), torch.rand(2)) for _ in range(2)]
    batch, ragged = Collated(collate)((samples, MINE))
    for found, whole in zip(batch, collate(samples), strict=True):
        assert torch.equal(found, whole[:, MINE])
    assert ragged == {".0": Ragged(1, Rows(1, 1, 2)), ".1": Ragged(1, Rows(1, 1, 2))}


class Padded:
    """A batch as scripts make it: tensors, and numbers of them."""

    def __init__(self, samples):
        self.texts = pad_sequence(samples)
        self.longest, self.last = len(self.texts), len(self.texts) - 1
        self.samples, self.tokens = len(samples), sum(map(len, samples))
        self.all_tokens = torch.tensor(self.tokens)
        self.pairs = torch.zeros(len(samples), 2), {"name": "padded"}


def test_an_object_has_this_ranks_rows_of_the_whole_batch_and_its_own_counts():
    batch, ragged = Collated(Padded)((SAMPLES, MINE))
    assert torch.equal(batch.texts, pad_sequence(SAMPLES)[:, MINE])
    assert (batch.longest, batch.last) == (7, 6)
    assert (batch.samples, batch.tokens, int(batch.all_tokens)) == (1, 3, 3)
    assert batch.pairs[0].shape == (1, 2)
    assert ragged[".texts"] == Ragged(1, Rows(1, 1, 3))


class Node(Padded):
    def __init__(self, samples):
        super().__init__(samples)
        self.parent = self


class Kept(Padded):
    def __copy__(self):
        raise TypeError("cannot be copied")


@pytest.mark.parametrize("kind", [Node, Kept])
def test_an_object_that_holds_itself_or_cannot_be_copied_is_collated_of_this_ranks_samples(kind):
    batch, _ = Collated(kind)((SAMPLES, MINE))
    assert torch.equal(batch.texts, pad_sequence(SAMPLES[MINE]))


def test_the_number_of_samples_beside_what_lies_end_to_end_is_this_ranks():
    collate = Collated(lambda samples: {"nodes": torch.cat(samples), "graphs": len(samples)})
    batch, ragged = collate((SAMPLES, MINE))
    assert (batch["graphs"], len(batch["nodes"])) == (1, 3)
    assert ragged == {".nodes": Ragged(0, Rows(3, 2, 12))}
