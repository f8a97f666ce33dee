"""Reads the examples' data sets into memory; a missing or damaged file ends the script with one sentence."""

import argparse
import gzip
import os
import pickle
import struct
import zlib
from contextlib import contextmanager
from math import prod
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset, Subset, TensorDataset

import samestep.data

try:
    from PIL import Image
except ImportError:
    Image = None


class DataError(SystemExit):
    """A data set is missing or damaged; as a SystemExit it is printed without a traceback."""


@contextmanager
def _in_words():
    """Turn an error of the system into such a sentence too."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{error.filename} cannot be read ({error.strerror.lower()}); make it readable, "
            "or name another directory with --data-dir"
        ) from None


def default_dir():
    """The directory of the data sets, unless --data-dir names another."""
    return os.environ.get("DATA_DIR") or os.environ.get("DSDIR") or "data"


def positive(text):
    """A type for argparse: a number of at least one."""
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text} is no number from 1 up")
    return int(text)


def workers(text):
    """An option's number of loading processes, or "auto"."""
    return text if text == "auto" else int(text)


def head(dataset, count):
    """The first samples of a data set, for a dry run."""
    return Subset(dataset, range(min(count, len(dataset))))


@_in_words()
def digits(root, train):
    """UCI's 8 x 8 digits from its two files, or without a root those of the package, every fifth to test."""
    if root is not None:
        return _labelled(root, *_read_digits(Path(root, "optdigits.tra" if train else "optdigits.tes")))
    images, labels = samestep.data.digits()
    chosen = (torch.arange(len(labels)) % 5 != 0) == train
    return TensorDataset(images[chosen], labels[chosen].long())


@_in_words()
def mnist(root, train):
    """The MNIST images, uint8 (n, 28, 28), from the four IDX files, gzipped or not."""
    part = "train" if train else "t10k"
    images = _read_idx(_find_idx(root, f"{part}-images-idx3-ubyte"), (28, 28))
    labels = _read_idx(_find_idx(root, f"{part}-labels-idx1-ubyte"), ())
    return _labelled(root, images, labels)


@_in_words()
def cifar10(root, train):
    """The CIFAR-10 images, uint8 (n, 3, 32, 32), from the binary or the Python version."""
    names = [f"data_batch_{i}" for i in range(1, 6)] if train else ["test_batch"]
    for folder in (Path(root), Path(root, "cifar-10-batches-bin"), Path(root, "cifar-10-batches-py")):
        for suffix, read in ((".bin", _read_cifar_binary), ("", _read_cifar_pickle)):
            if (folder / (names[0] + suffix)).is_file():
                parts = [read(folder / (name + suffix)) for name in names]
                return _labelled(folder, *(torch.cat(column) for column in zip(*parts, strict=True)))
    raise DataError(
        f"{root} has no CIFAR-10; unpack cifar-10-binary.tar.gz or cifar-10-python.tar.gz "
        "(Alex Krizhevsky's CIFAR page, University of Toronto) there, or name its folder with --data-dir"
    )


class CropAndFlip(Dataset):
    """Images that are shifted by up to four pixels and mirrored at random, each time they are read."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        image, label = self.dataset[index]
        height, width = image.shape[-2:]
        top, left = torch.randint(0, 9, (2,)).tolist()
        image = F.pad(image, (4, 4, 4, 4))[..., top : top + height, left : left + width]
        return (image.flip(-1) if torch.rand(()) < 0.5 else image), label


class ImageFolder(Dataset):
    """Images in <root>/<class>/, decoded with Pillow as uint8 (3, size, size); cropped at random to train."""

    _suffixes = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm")

    @_in_words()
    def __init__(self, root, size, *, train):
        if Image is None:
            raise DataError(
                "image folders are decoded with Pillow, which is not installed; `pip install pillow`, "
                "or leave out --data-dir for synthetic images"
            )
        self.size, self.train = size, train
        part = Path(root, "train" if train else "val")
        # A class has the number of its folder in train/, also if val/ lacks some folders.
        self.classes = _folders(Path(root, "train"))
        if unknown := set(_folders(part)) - set(self.classes):
            raise DataError(
                f"{part} has a class {min(unknown)} that {root}/train has not; remove or rename it"
            )
        self.samples = [
            (os.path.join(folder, name), self.classes.index(class_name))
            for class_name in _folders(part)
            for folder, _, names in sorted(_walk(part / class_name))
            for name in sorted(names)
            if name.lower().endswith(self._suffixes)
        ]
        if not self.samples:
            raise DataError(
                f"{part} has no images; put them in {root}/train/<class>/ and {root}/val/<class>/ "
                "(ImageNet's layout), or name another directory with --data-dir"
            )

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        path, label = self.samples[index]
        try:
            with Image.open(path) as file:
                image = file.convert("RGB")
        except Exception as error:
            raise ValueError(f"{path} cannot be read as an image ({error}); replace or remove it") from None
        box = _random_box(*image.size) if self.train else _central_box(*image.size)
        image = image.resize((self.size, self.size), Image.Resampling.BILINEAR, box)
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        pixels = pixels.view(self.size, self.size, 3).permute(2, 0, 1).contiguous()
        return (pixels.flip(-1) if self.train and torch.rand(()) < 0.5 else pixels), label


def synthetic_images(count, size, classes):
    """Random pixels with random labels, the same on every rank: to measure speed, not to learn."""
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=draw)
    return TensorDataset(images, torch.randint(0, classes, (count,), generator=draw))


@_in_words()
def text(root):
    """All *.txt files below a directory as one string; without a directory, Python's own help topics."""
    if root is None:
        from pydoc_data.topics import topics

        return "\n".join(topics.values())
    found = (Path(folder, name) for folder, _, names in _walk(root) for name in names)
    files = sorted(file for file in found if file.suffix == ".txt")
    whole = "\n".join(file.read_text(encoding="utf-8", errors="replace") for file in files)
    if not whole:
        raise DataError(
            f"{root} has no text; put *.txt files there, or leave out --data-dir for a built-in one"
        )
    return whole


def _walk(directory):
    """All folders below this one, each once, also behind links; a folder that cannot be listed is an error."""

    def refuse(error):
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            raise error

    seen = set()
    for folder, folders, names in os.walk(directory, onerror=refuse, followlinks=True):
        if (real := os.path.realpath(folder)) in seen:
            folders.clear()
            continue
        seen.add(real)
        folders.sort()  # if two paths lead to a folder, every rank takes the same
        yield folder, folders, names


def _folders(directory):
    return sorted(entry.name for entry in directory.iterdir() if entry.is_dir()) if directory.is_dir() else []


def _labelled(place, images, labels):
    if len(images) != len(labels):
        raise DataError(f"{place} has {len(images)} images but {len(labels)} labels; fetch the files again")
    if len(labels) == 0 or labels.max() > 9:
        found = f"a label {labels.max()}" if len(labels) else "no images"
        raise DataError(f"{place} has {found} where ten classes, 0 to 9, are expected; fetch the files again")
    return TensorDataset(images, labels.long())


def _read_digits(path):
    if not path.is_file():
        raise DataError(
            f"{path.parent} has no {path.name}; put optdigits.tra and optdigits.tes there (UCI's Optical Recognition "
            "of Handwritten Digits), or leave out --data-dir for the digits of the package"
        )
    try:
        rows = np.loadtxt(path, np.uint8, delimiter=",", ndmin=2)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}); fetch it again") from None
    if rows.shape[1:] != (65,) or rows[:, :64].max() > 16:
        raise DataError(f"{path} has lines that are not 64 pixels from 0 to 16 and a label; fetch it again")
    pixels, labels = torch.from_numpy(rows).split([64, 1], dim=1)
    return pixels.reshape(-1, 8, 8), labels.flatten()


def _find_idx(root, name):
    for folder in (Path(root), Path(root, "MNIST", "raw"), Path(root, "MNIST"), Path(root, "mnist")):
        for path in (folder / name, folder / f"{name}.gz"):
            if path.is_file():
                return path
    raise DataError(
        f"{root} has no {name}; put MNIST's four files there (train-images-idx3-ubyte, "
        "train-labels-idx1-ubyte, t10k-images-idx3-ubyte, t10k-labels-idx1-ubyte, each as it is or with .gz; "
        "from Yann LeCun's MNIST page or a mirror of it), or name their folder with --data-dir"
    )


def _read_idx(path, item_shape):
    raw = _bytes(path)
    dims = 1 + len(item_shape)
    begin = bytes([0, 0, 8, dims])
    if raw[:4] != begin:
        raise DataError(f"{path} begins with 0x{raw[:4].hex()} where IDX has 0x{begin.hex()}; fetch it again")
    header = 4 + 4 * dims
    shape = struct.unpack_from(f">{dims}I", raw, 4) if len(raw) >= header else ()
    if len(raw) != header + prod(shape):
        said = f"{header + prod(shape)} bytes by its header" if shape else f"a header of {header} bytes"
        raise DataError(f"{path} holds {len(raw)} bytes where there should be {said}; fetch it again")
    if shape[1:] != item_shape:
        raise DataError(
            f"{path} holds items of shape {shape[1:]} where MNIST's have {item_shape}; fetch it again"
        )
    return torch.frombuffer(raw, dtype=torch.uint8)[header:].view(shape)


def _read_cifar_binary(path):
    raw = _bytes(path)
    if not raw or len(raw) % 3073:
        raise DataError(
            f"{path} holds {len(raw)} bytes, no multiple of 3073 (a label and 3 x 32 x 32); fetch it again"
        )
    records = torch.frombuffer(raw, dtype=torch.uint8).view(-1, 3073)
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0]


class _ArraysOnly(pickle.Unpickler):
    # A pickle may call any function that it names; an array of bytes needs only these three.
    _allowed = {  # noqa: RUF012
        "_reconstruct": np.empty(0).__reduce__()[0],
        "ndarray": np.ndarray,
        "dtype": lambda *_: np.dtype(np.uint8),
    }

    def find_class(self, module, name):
        if module.split(".")[0] != "numpy" or name not in self._allowed:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return self._allowed[name]


def _read_cifar_pickle(path):
    try:
        with open(path, "rb") as file:
            batch = _ArraysOnly(file, encoding="bytes").load()
        pixels, labels = np.array(batch[b"data"]), torch.tensor(batch[b"labels"], dtype=torch.uint8)
        return torch.from_numpy(pixels).view(-1, 3, 32, 32), labels.view(-1)
    except Exception as error:
        raise DataError(f"{path} is no batch of CIFAR-10 ({error}); fetch it again") from None


def _bytes(path):
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            return bytearray(file.read())
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read ({error}); fetch it again") from None


def _random_box(width, height):
    """A random crop of 8 to 100 % of the area, with sides of at most 4 to 3, as in the training of ResNets."""
    for _ in range(10):
        area = width * height * (0.08 + 0.92 * torch.rand(()).item())
        ratio = (0.75 * (16 / 9) ** torch.rand(()).item()) ** 0.5
        w, h = area**0.5 * ratio, area**0.5 / ratio
        if w <= width and h <= height:
            left, top = torch.rand(()).item() * (width - w), torch.rand(()).item() * (height - h)
            return left, top, left + w, top + h
    return _central_box(width, height)


def _central_box(width, height):
    """The central square, 7/8 of the shorter side, as in the test of ResNets."""
    side = min(width, height) * 7 / 8
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side
