"""Tiny data sets of every kind, written as their publishers write them."""

import gzip
import importlib.util
import pickle
import struct
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from PIL import Image

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="session")
def datasets() -> ModuleType:
    """examples/datasets.py, under a name that Hugging Face's package of the same name does not have."""
    spec = importlib.util.spec_from_file_location("samestep_examples_datasets", EXAMPLES / "datasets.py")
    assert spec
    assert spec.loader
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def tiny() -> ModuleType:
    """The functions of this file."""
    return sys.modules[__name__]


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_mnist(root: Path, *, suffix: str = "", count: int = 5) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(0)
    images = draw.integers(0, 256, (count, 28, 28), dtype=np.uint8)
    labels = draw.integers(0, 10, count, dtype=np.uint8)
    root.mkdir(parents=True, exist_ok=True)
    pack = gzip.compress if suffix else bytes
    for part in ("train", "t10k"):
        (root / f"{part}-images-idx3-ubyte{suffix}").write_bytes(pack(idx(images)))
        (root / f"{part}-labels-idx1-ubyte{suffix}").write_bytes(pack(idx(labels)))
    return images, labels


def write_digits(root: Path, count: int = 40) -> np.ndarray:
    draw = np.random.default_rng(0)
    rows = np.hstack([draw.integers(0, 17, (count, 64)), draw.integers(0, 10, (count, 1))])
    for name in ("optdigits.tra", "optdigits.tes"):
        np.savetxt(root / name, rows, fmt="%d", delimiter=",")
    return rows


def cifar_batch(seed: int, count: int = 3) -> tuple[np.ndarray, list[int]]:
    draw = np.random.default_rng(seed)
    return draw.integers(0, 256, (count, 3072), dtype=np.uint8), draw.integers(0, 10, count).tolist()


def write_cifar(root: Path, version: str) -> None:
    folder = root / ("cifar-10-batches-bin" if version == "binary" else "cifar-10-batches-py")
    folder.mkdir(parents=True)
    for seed, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        pixels, labels = cifar_batch(seed)
        if version == "binary":
            rows = (bytes([label]) + row.tobytes() for label, row in zip(labels, pixels, strict=True))
            (folder / f"{name}.bin").write_bytes(b"".join(rows))
        else:
            # The files that are handed out were written with numpy 1's module names.
            raw = pickle.dumps({b"data": pixels, b"labels": labels}, protocol=3)
            (folder / name).write_bytes(raw.replace(b"cnumpy._core.", b"cnumpy.core."))


def write_images(root: Path, classes: tuple[str, ...] = ("cat", "dog"), count: int = 2) -> None:
    for part in ("train", "val"):
        for shade, name in enumerate(classes):
            (root / part / name).mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", (40 + i, 30), (100 * shade, 0, 0)).save(root / part / name / f"{i}.png")
