"""The readers of the examples take whole data sets and refuse damaged ones with one sentence."""

import gzip
import pickle
import struct
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def test_digits_of_the_package_are_1797_and_every_fifth_is_for_the_test(datasets: ModuleType) -> None:
    train, test = datasets.digits(None, train=True), datasets.digits(None, train=False)
    assert (len(train), len(test)) == (1437, 360)
    assert train.tensors[0].dtype == torch.uint8
    assert train.tensors[0].max() == 16
    assert sorted(set(test.tensors[1].tolist())) == list(range(10))


def test_all_of_ucis_digits_are_read_as_they_were_written(
    datasets: ModuleType, tiny: ModuleType, tmp_path: Path
) -> None:
    rows = tiny.write_digits(tmp_path)
    for train in (True, False):
        found = datasets.digits(tmp_path, train=train)
        assert np.array_equal(found.tensors[0].flatten(1).numpy(), rows[:, :64])
        assert found.tensors[1].tolist() == rows[:, 64].tolist()


DAMAGED_DIGITS = {
    "missing": (None, r"has no optdigits\.tra; put optdigits\.tra and optdigits\.tes there"),
    "empty": ("", "not 64 pixels from 0 to 16 and a label"),
    "a web page": ("<!DOCTYPE html>\n", "cannot be read"),
    "cut in a line": (",".join(["0"] * 65) + "\n0,0", "cannot be read"),
    "without labels": (",".join(["0"] * 64), "not 64 pixels from 0 to 16 and a label"),
    "too bright": (",".join(["17"] * 64 + ["3"]), "not 64 pixels from 0 to 16 and a label"),
    "beyond a byte": (",".join(["0"] * 64 + ["300"]), "cannot be read"),
    "an eleventh class": (",".join(["0"] * 64 + ["10"]), "has a label 10"),
}


@pytest.mark.parametrize("damage", DAMAGED_DIGITS)
@pytest.mark.filterwarnings("ignore:loadtxt. input contained no data")
def test_a_file_of_digits_is_refused_in_one_sentence(
    datasets: ModuleType, tmp_path: Path, damage: str
) -> None:
    text, sentence = DAMAGED_DIGITS[damage]
    if text is not None:
        (tmp_path / "optdigits.tra").write_text(text)
    with pytest.raises(SystemExit, match=sentence) as found:
        datasets.digits(tmp_path, train=True)
    assert str(tmp_path) in str(found.value)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(("folder", "suffix"), [("", ""), ("", ".gz"), ("MNIST/raw", "")])
def test_mnist_is_read_as_it_was_written(
    datasets: ModuleType, tiny: ModuleType, tmp_path: Path, folder: str, suffix: str
) -> None:
    images, labels = tiny.write_mnist(tmp_path / folder, suffix=suffix)
    for train in (True, False):
        found = datasets.mnist(tmp_path, train=train)
        assert np.array_equal(found.tensors[0].numpy(), images)
        assert found.tensors[1].tolist() == labels.tolist()


def test_missing_mnist_is_one_sentence_that_says_what_to_put_where(
    datasets: ModuleType, tmp_path: Path
) -> None:
    with pytest.raises(
        SystemExit, match=r"has no train-images-idx3-ubyte; put MNIST's four files there"
    ) as found:
        datasets.mnist(tmp_path / "nowhere", train=True)
    assert "\n" not in str(found.value)
    assert "--data-dir" in str(found.value)


IMAGES = "train-images-idx3-ubyte"
LABELS = "train-labels-idx1-ubyte"
DAMAGED_IDX = {
    "empty": (IMAGES, b"", "begins with 0x where IDX has 0x00000803"),
    "labels for images": (
        IMAGES,
        idx(np.zeros(5, np.uint8)),
        "begins with 0x00000801 where IDX has 0x00000803",
    ),
    "a web page": (IMAGES, b"<!DOCTYPE html>", "begins with 0x3c21444f"),
    "cut in the header": (IMAGES, idx(np.zeros((5, 28, 28), np.uint8))[:10], "holds 10 bytes"),
    "cut in the pixels": (
        IMAGES,
        idx(np.zeros((5, 28, 28), np.uint8))[:-1],
        "holds 3935 bytes .* 3936 bytes",
    ),
    "promising 2**96 bytes": (IMAGES, bytes([0, 0, 8, 3]) + b"\xff" * 12, "holds 16 bytes"),
    "of another size": (
        IMAGES,
        idx(np.zeros((5, 8, 8), np.uint8)),
        r"shape \(8, 8\) where MNIST's have \(28, 28\)",
    ),
    "without images": (IMAGES, idx(np.zeros((0, 28, 28), np.uint8)), "0 images but 5 labels"),
    "short of labels": (LABELS, idx(np.zeros(4, np.uint8)), "5 images but 4 labels"),
    "with eleven classes": (LABELS, idx(np.full(5, 10, np.uint8)), "has a label 10"),
    "not gzip": (IMAGES + ".gz", b"plain", "cannot be read"),
    "cut in the gzip": (IMAGES + ".gz", gzip.compress(bytes(range(256)))[:-9], "cannot be read"),
    "garbled gzip": (IMAGES + ".gz", gzip.compress(b"")[:10] + b"\xff" * 20, "cannot be read"),
}


@pytest.mark.parametrize("damage", DAMAGED_IDX)
def test_an_mnist_file_is_refused_by_name(
    datasets: ModuleType, tiny: ModuleType, tmp_path: Path, damage: str
) -> None:
    name, raw, sentence = DAMAGED_IDX[damage]
    tiny.write_mnist(tmp_path)
    (tmp_path / name.removesuffix(".gz")).unlink()
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(SystemExit, match=sentence) as found:
        datasets.mnist(tmp_path, train=True)
    assert str(tmp_path) in str(found.value)


@pytest.mark.parametrize("version", ["binary", "python"])
def test_both_versions_of_cifar10_are_read_as_they_were_written(
    datasets: ModuleType, tiny: ModuleType, tmp_path: Path, version: str
) -> None:
    tiny.write_cifar(tmp_path, version)
    train, test = datasets.cifar10(tmp_path, train=True), datasets.cifar10(tmp_path, train=False)
    for found, seeds in ((train, range(5)), (test, [5])):
        batches = [tiny.cifar_batch(seed) for seed in seeds]
        assert np.array_equal(
            found.tensors[0].numpy(), np.concatenate([pixels for pixels, _ in batches]).reshape(-1, 3, 32, 32)
        )
        assert found.tensors[1].tolist() == [label for _, labels in batches for label in labels]


def test_missing_cifar10_is_one_sentence_that_says_what_to_put_where(
    datasets: ModuleType, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match=r"has no CIFAR-10; unpack cifar-10-binary.tar.gz") as found:
        datasets.cifar10(tmp_path, train=True)
    assert "\n" not in str(found.value)


class Hostile:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("a pickle ran code",)


def reconstruct_on_disk() -> bytes:
    return b"cnumpy\nmemmap\n(S'/dev/null'\ntR."


DAMAGED_CIFAR = {
    "a cut record": (".bin", bytes(3073 * 2 - 1), "holds 6145 bytes, no multiple of 3073"),
    "an empty file": (".bin", b"", "holds 0 bytes"),
    "an eleventh class": (".bin", bytes([10]) + bytes(3072), "has a label 10"),
    "code in a pickle": ("", pickle.dumps({b"data": Hostile()}), r"it asks for builtins.print"),
    "another part of numpy": ("", reconstruct_on_disk(), r"it asks for numpy.memmap"),
    "a cut pickle": (
        "",
        pickle.dumps({b"data": np.zeros((1, 3072), np.uint8), b"labels": [0]})[:-20],
        "is no batch",
    ),
    "no pickle": ("", b"<!DOCTYPE html>", "is no batch"),
    "a pickle of something else": ("", pickle.dumps([1, 2]), "is no batch"),
    "an array too small": (
        "",
        pickle.dumps({b"data": np.zeros(5, np.uint8), b"labels": [0]}, 3),
        "is no batch",
    ),
}


@pytest.mark.parametrize("damage", DAMAGED_CIFAR)
def test_a_cifar10_file_is_refused_by_name(
    datasets: ModuleType, tmp_path: Path, damage: str, capfd: pytest.CaptureFixture[str]
) -> None:
    suffix, raw, sentence = DAMAGED_CIFAR[damage]
    (tmp_path / f"test_batch{suffix}").write_bytes(raw)
    with pytest.raises(SystemExit, match=sentence) as found:
        datasets.cifar10(tmp_path, train=False)
    assert str(tmp_path) in str(found.value)
    assert "a pickle ran code" not in capfd.readouterr().out


def test_an_image_folder_gives_square_bytes_and_the_class_of_its_folder(
    datasets: ModuleType, tiny: ModuleType, tmp_path: Path
) -> None:
    tiny.write_images(tmp_path)
    for train in (True, False):
        found = datasets.ImageFolder(tmp_path, 16, train=train)
        samples = [found[i] for i in range(len(found))]
        assert [label for _, label in samples] == [0, 0, 1, 1]
        for image, label in samples:
            assert image.shape == (3, 16, 16)
            assert image.dtype == torch.uint8
            assert (image[0] == 100 * label).all()


def test_a_class_keeps_its_number_where_val_lacks_another(
    datasets: ModuleType, tiny: ModuleType, tmp_path: Path
) -> None:
    tiny.write_images(tmp_path)
    for file in (tmp_path / "val" / "cat").iterdir():
        file.unlink()
    (tmp_path / "val" / "cat").rmdir()
    assert {label for _, label in datasets.ImageFolder(tmp_path, 16, train=False).samples} == {1}
    (tmp_path / "val" / "emu").mkdir()
    with pytest.raises(SystemExit, match=r"has a class emu that .*train has not"):
        datasets.ImageFolder(tmp_path, 16, train=False)


def test_an_empty_image_folder_is_one_sentence(datasets: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"train has no images; put them in .*/train/<class>/"):
        datasets.ImageFolder(tmp_path, 16, train=True)


@pytest.mark.parametrize("raw", [b"", b"not an image", "cut"])
def test_a_damaged_image_is_named(
    datasets: ModuleType, tiny: ModuleType, tmp_path: Path, raw: bytes | str
) -> None:
    tiny.write_images(tmp_path, classes=("cat",), count=1)
    path = tmp_path / "val" / "cat" / "0.png"
    path.write_bytes(path.read_bytes()[:60] if isinstance(raw, str) else raw)
    with pytest.raises(ValueError, match=r"0.png cannot be read as an image"):
        datasets.ImageFolder(tmp_path, 16, train=False)[0]


def test_image_folders_without_pillow_say_what_to_install(
    datasets: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets, "Image", None)
    with pytest.raises(SystemExit, match="pip install pillow"):
        datasets.ImageFolder(tmp_path, 16, train=True)


def test_a_crop_moves_the_image_by_at_most_four_pixels_and_keeps_its_bytes(datasets: ModuleType) -> None:
    image = torch.arange(1, 65, dtype=torch.uint8).view(1, 1, 8, 8)
    moved = datasets.CropAndFlip(torch.utils.data.TensorDataset(image, torch.tensor([3])))
    padded = torch.nn.functional.pad(image[0], (4, 4, 4, 4))
    whole = {tuple(padded[0, t : t + 8, s : s + 8].flatten().tolist()) for t in range(9) for s in range(9)}
    torch.manual_seed(0)
    seen = set()
    for _ in range(100):
        found, label = moved[0]
        assert label == 3
        assert {tuple(found.flatten().tolist()), tuple(found.flip(-1).flatten().tolist())} & whole
        seen.add(tuple(found.flatten().tolist()))
    assert len(seen) > 50


def test_a_random_box_lies_inside_the_image(datasets: ModuleType) -> None:
    torch.manual_seed(0)
    for width, height in ((500, 375), (40, 30), (1, 1), (1000, 10)):
        for _ in range(200):
            left, top, right, bottom = datasets._random_box(width, height)
            assert 0 <= left < right <= width + 1e-6
            assert 0 <= top < bottom <= height + 1e-6


def test_the_built_in_text_is_there_and_a_folder_without_text_is_one_sentence(
    datasets: ModuleType, tmp_path: Path
) -> None:
    assert len(datasets.text(None)) > 100_000
    with pytest.raises(SystemExit, match=r"has no text; put \*.txt files there"):
        datasets.text(tmp_path)
    (tmp_path / "a.txt").write_text("abc")
    assert datasets.text(tmp_path) == "abc"


def test_what_a_link_leads_to_is_read_and_a_folder_called_txt_is_no_text(
    datasets: ModuleType, tiny: ModuleType, tmp_path: Path
) -> None:
    tiny.write_images(tmp_path / "elsewhere")
    for part in ("train", "val"):
        (tmp_path / part / "all").mkdir(parents=True)
        (tmp_path / part / "all" / "more").symlink_to(tmp_path / "elsewhere" / part)
        (tmp_path / part / "all" / "again").symlink_to(tmp_path / part)
        assert len(datasets.ImageFolder(tmp_path, 16, train=part == "train")) == 4
    (tmp_path / "texts" / "old.txt").mkdir(parents=True)
    (tmp_path / "texts" / "old.txt" / "a.txt").write_text("abc")
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "to").symlink_to(tmp_path / "texts")
    assert datasets.text(tmp_path / "texts") == datasets.text(tmp_path / "link") == "abc"


def test_what_the_system_refuses_to_read_is_one_sentence(datasets: ModuleType, tmp_path: Path) -> None:
    refused = tmp_path / ("d" * 300)
    for name in ("digits", "mnist", "cifar10", "text", "ImageFolder"):
        size = {"size": 16} if name == "ImageFolder" else {}
        train = {"train": True} if name != "text" else {}
        with pytest.raises(SystemExit, match=r"cannot be read \(file name too long\); make it readable"):
            getattr(datasets, name)(refused, **size, **train)
    (tmp_path / "a.txt").symlink_to("nowhere")
    with pytest.raises(SystemExit, match=r"a.txt cannot be read \(no such file or directory\)"):
        datasets.text(tmp_path)


def test_the_default_directory_is_named_by_the_environment(
    datasets: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DATA_DIR", raising=False)
    monkeypatch.delenv("DSDIR", raising=False)
    assert datasets.default_dir() == "data"
    monkeypatch.setenv("DSDIR", "/shared")
    assert datasets.default_dir() == "/shared"
    monkeypatch.setenv("DATA_DIR", "/mine")
    assert datasets.default_dir() == "/mine"
