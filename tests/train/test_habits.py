"""What users of torch, Accelerate and Fabric write by habit works, or is a sentence with the line to write."""

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

import samestep
from samestep import CheckpointError, UsageError
from samestep.failure import add_remedy
from samestep.train.group.world import joined

DATA = TensorDataset(torch.arange(23.0)[:, None], torch.arange(23))
LIST = [(torch.full((2,), float(index)), index) for index in range(23)]


def doubled(samples):
    return torch.stack([2 * x for x, _ in samples])


def remedies(error):
    add_remedy(error)
    return " ".join(error.__notes__)


def test_shuffle_may_come_third_as_for_a_dataloader(world):
    torch.manual_seed(4)
    wanted = [batch[1].tolist() for batch in samestep.loader(DATA, 6, shuffle=True)]
    torch.manual_seed(4)
    assert [batch[1].tolist() for batch in samestep.loader(DATA, 6, True)] == wanted


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 6, "shuffle": True},
        {"batch_size": 6, "drop_last": True},
        {
            "batch_size": 6,
            "shuffle": True,
            "collate_fn": doubled,
            "num_workers": 1,
            "persistent_workers": True,
        },
        {"batch_size": 6, "sampler": WeightedRandomSampler(torch.arange(1.0, 24.0), 23)},
        {"batch_sampler": BatchSampler(RandomSampler(DATA), 6, False)},
    ],
    ids=["shuffled", "dropping", "collated by a worker", "sampled", "in batches"],
)
@pytest.mark.parametrize("data", [DATA, LIST, Subset(LIST, range(23))], ids=["tensors", "list", "subset"])
def test_a_dataloader_is_taken_over_with_its_order(world, data, options):
    """The samples of each batch are those of torch's own iterator, one rank's share after the other's."""
    torch.manual_seed(4)
    wanted = [batch[0] if "collate_fn" not in options else batch for batch in DataLoader(data, **options)]
    torch.manual_seed(4)
    taken = samestep.loader(DataLoader(data, **options))
    found = [batch[0] if "collate_fn" not in options else batch for batch in taken]
    whole = samestep.gather([batch.tolist() for batch in found])
    assert len(found) == len(wanted)
    for number, batch in enumerate(wanted):
        parts = whole[number * world.size : (number + 1) * world.size]
        rows = [row for part in parts for row in part]
        assert sorted(rows) == sorted(batch.tolist())
        if world.size == 1:
            assert rows == batch.tolist()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: samestep.loader(DataLoader(DATA, 6), 6), "got a DataLoader and batch_size; write loader(dl.dataset"),
        (lambda: samestep.loader(DataLoader(DATA, 6), shuffle=True), "got a DataLoader and shuffle"),
        (lambda: samestep.loader(DataLoader(DATA, batch_size=None)), "got a DataLoader with batch_size=None"),
        (lambda: samestep.loader(DATA, 6, shufle=True), "loader knows no option shufle; did you mean shuffle?"),
        (lambda: samestep.steps(DataLoader(DATA, 6), 6, microbatch=2), "write steps(dl.dataset, batch_size="),
        (lambda: samestep.loader(DATA, batchsize=6), "loader knows no option batchsize; did you mean batch_size?"),
        (lambda: samestep.loader(DATA, on_device=False), "loader got no batch_size"),
        (lambda: samestep.loader(DATA), "loader got no batch_size, the samples of one optimizer step"),
        (
            lambda: samestep.replicate(nn.Linear(2, 2), torch.optim.SGD(nn.Linear(2, 2).parameters())),
            "got a Linear and a SGD, and takes one model; write model = samestep.replicate(model)",
        ),
        (lambda: samestep.replicate(nn.Linear(2, 2, device="meta")), "a Linear on the meta device, which has no"),
        (lambda: samestep.Checkpoint("ck", nn.Linear(2, 2)), "without a name; write Checkpoint(directory, model=model"),
        (lambda: samestep.save({"a": 1}, "model.pt"), "save got a dict as its path; the path comes first"),
        (lambda: samestep.save("model.safetensors", {}), "in torch's format, which is not that of safetensors; write"),
        (lambda: samestep.load({}), "load got a dict as its path; write samestep.load('model.pt')"),
        (lambda: samestep.Checkpoint(nn.Linear(2, 2), "ck"), "got a Linear as its directory, which comes first"),
        (lambda: samestep.Checkpoint(None, model=nn.Linear(2, 2)), "got None as its directory"),
        (lambda: samestep.Checkpoint("ck", model=nn.Linear(2, 2), keep="all"), "keep='all' leaves nothing to go"),
        (lambda: samestep.loader(6, DATA), "is not a number of samples; use an integer of at least 1"),
        (lambda: samestep.loader(DATA, True), "batch_size True is not a number of samples"),
        (lambda: samestep.loader("data/train", 6), "loader got str, which has no samples by index"),
        (lambda: list(samestep.loader(DATA, 6).epochs("3")), "epochs('3') is not a number of epochs; write an integer"),
    ],
)  # fmt: skip
def test_a_line_of_another_library_is_a_sentence_with_the_line_to_write(world, make, said):
    with pytest.raises(UsageError) as caught:
        make()
    assert said in str(caught.value)


@pytest.mark.sizes(1, 2)
def test_load_of_a_directory_names_what_reads_it(world, tmp_path):
    with pytest.raises(
        CheckpointError, match=r"is a directory; name a file that save wrote, or go on .*resume\(\)"
    ):
        samestep.load(tmp_path)


@pytest.mark.sizes(2)
def test_errors_of_torch_and_python_get_the_line_to_write(world):
    model = samestep.replicate(nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2)))
    with pytest.raises(AttributeError) as caught:
        print(model.module)
    assert "write model where model.module stands" in remedies(caught.value)
    with pytest.raises(AttributeError) as caught:
        model.no_sync()
    assert "with samestep.no_sync(model):" in remedies(caught.value)
    with pytest.raises(ValueError, match="device_ids") as caught:
        samestep.replicate(nn.Linear(1, 2), device_ids=[0])
    assert "leave device_ids out" in remedies(caught.value)
    with pytest.raises(ValueError, match="more than 1 value per channel") as caught:
        model(torch.ones(1, 1))
    assert "replicate(model, sync_batchnorm=True)" in remedies(caught.value)


@pytest.mark.sizes(1, 2)
@pytest.mark.parametrize(
    ("habit", "remedy"),
    [
        (lambda: samestep.loader(DATA, 6).set_epoch(1), "leave set_epoch out"),
        (lambda: samestep.loader(DATA, 6).sampler.set_epoch(1), "leave set_epoch out"),
        (lambda: samestep.Checkpoint("ck", model=nn.Linear(1, 1)).save(), "commit()"),
        (lambda: samestep.Checkpoint("ck", model=nn.Linear(1, 1)).load(), "resume()"),
        (lambda: samestep.load("x.pt", map_location="cpu"), "leave it out"),
        (lambda: samestep.init().is_main_process, "world.rank == 0"),
        (lambda: samestep.init().world_size, "world.size"),
        (lambda: samestep.init().local_process_index, "world.local_rank"),
        (lambda: samestep.steps(DATA, 6), "microbatch=8"),
    ],
    ids=["loader", "sampler", "save", "load", "map_location", "main process", "world_size", "index", "steps"],
)
def test_a_name_of_another_library_gets_the_line_to_write(world, tmp_path, monkeypatch, habit, remedy):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((AttributeError, TypeError)) as caught:
        habit()
    assert remedy in remedies(caught.value)


@pytest.mark.sizes(1, 2)
def test_a_batch_size_that_is_written_as_a_number_is_named_where_it_does_not_fit(world):
    for x, _ in samestep.loader(DATA, 8):
        try:
            nn.LSTM(1, 2, batch_first=True)(x[:, None], (torch.zeros(1, 8, 2),) * 2)
        except RuntimeError as error:
            add_remedy(error, share=joined().share)
            said = error.__notes__[0]
        else:
            said = ""
        break
    assert ("has 4 of the batch's 8 samples; if 8 stands for the size of a batch here" in said) == (
        world.size > 1
    )


@pytest.mark.sizes(2)
def test_a_mask_of_the_shares_longest_sequence_beside_padded_rows_gets_the_line_to_write(world):
    samestep.replicate(nn.Linear(1, 1), same=True)
    lengths = torch.tensor([2, 5])
    for x, _ in samestep.loader(TensorDataset(torch.ones(2, 5, 1), lengths), 2):
        mine = lengths[world.rank :][: len(x)]
        packed = nn.utils.rnn.pack_padded_sequence(x, mine, batch_first=True)
        out, _ = nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)
        assert out.size(1) == 5
        if world.rank == 1:
            continue
        with pytest.raises(RuntimeError) as caught:
            print(out[..., 0] * (torch.arange(mine.max()) < mine[:, None]))
        add_remedy(caught.value, share=joined().share)
        assert "as out.size(1)" in caught.value.__notes__[0]


def test_names_of_other_libraries_name_ours():
    for name, said in {
        "prepare": "replicate",
        "barrier": "torch.distributed",
        "all_reduce": "samestep.sum",
    }.items():
        with pytest.raises(AttributeError, match=f"has no attribute '{name}'; .*{said}"):
            getattr(samestep, name)
    with pytest.raises(AttributeError, match=r"has no attribute 'nonsense'$"):
        print(samestep.nonsense)


@pytest.mark.parametrize("error", ["ConnectionResetError(104, 'Connection reset by peer')", "EOFError()"])
def test_an_error_of_a_connection_to_a_loader_worker_says_that_the_worker_has_ended(error):
    fetch = compile(f"raise {error}", "/lib/torch/utils/data/dataloader.py", "exec")
    with pytest.raises((ConnectionResetError, EOFError)) as caught:
        exec(fetch)
    add_remedy(caught.value)
    assert caught.value.__notes__[0].startswith("samestep: a loader worker has ended")
