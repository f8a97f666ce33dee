"""A script as users write it; the comment of a line is what a type checker has to say of it."""

from typing import reveal_type

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import samestep


class Images(Dataset[tuple[Tensor, int]]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.zeros(3), index


class Net(nn.Linear):
    pass


reveal_type(samestep.init().device)  # device
reveal_type(samestep.replicate(Net(3, 2)))  # Net
reveal_type(samestep.loader(Images(), batch_size=4, num_workers=2))  # Loader[tuple[Tensor, int]]
reveal_type(samestep.loader(DataLoader(Images(), batch_size=4)))  # Loader[tuple[Tensor, int]]
reveal_type(samestep.loader(["a", "b"], 2))  # Loader[str]
for step in samestep.steps(Images(), batch_size=8, microbatch=2):
    reveal_type(step)  # Step[tuple[Tensor, int]]
    for batch in step:
        reveal_type(batch)  # tuple[Tensor, int]
reveal_type(samestep.mean(0.5))  # float
samestep.loader(Images(), batch_size=4, shufle=True)  # No parameter named "shufle"
