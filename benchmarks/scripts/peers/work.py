"""What the scripts of all peers share: the network, the images, and what is noted of a run."""

import json
import os
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

BATCH, EPOCHS, TRAINED, TESTED = 64, 2, 6000, 1999


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AvgPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AvgPool2d(4),
            nn.Flatten(), nn.Linear(288, 10),
        )  # fmt: skip


def images(count: int, seed: int) -> TensorDataset:
    """Noisy copies of ten patterns."""
    patterns = torch.randn(10, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 10, (count,), generator=generator)
    return TensorDataset(patterns[labels] + 6 * torch.randn(count, 1, 28, 28, generator=generator), labels)


train_set, test_set = images(TRAINED, 1), images(TESTED, 2)


class Notes:
    """Of rank 0: when its first step ended, how long the others took, and the accuracies that the script printed."""

    def __init__(self) -> None:
        self.facts: dict[str, object] = {}
        self.times: list[float] = []

    def step(self) -> None:
        self.facts.setdefault("first_step", time.time())
        self.times.append(time.perf_counter())

    def end(self, accuracy: float, model: nn.Module) -> None:
        """The accuracy that the script found, beside that of the whole test set."""
        model.eval()
        with torch.no_grad():
            parts = zip(*(of_all.split(BATCH) for of_all in test_set.tensors), strict=True)
            right = sum((model(x).argmax(1) == y).sum().item() for x, y in parts)
        steps = sorted(after - before for before, after in zip(self.times, self.times[1:], strict=False))
        self.facts |= {"step_s": steps[len(steps) // 2], "accuracy": accuracy, "truth": right / TESTED}
        with open(os.environ["NOTES"], "w") as file:
            json.dump(self.facts, file)


notes = Notes()
