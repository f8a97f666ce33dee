import torch
from torch.utils.data import TensorDataset


def make_dataset():
    x, y = torch.randn(70, 4), torch.rand(70, 2)
    return TensorDataset(x[:50], y[:50]), TensorDataset(x[50:], y[50:])
