"""The digits and the network of every script in this folder, so that those show only what migration changes."""

from torch import nn
from torch.utils.data import TensorDataset

import samestep.data

images, labels = samestep.data.digits()
images = images.float() / 16
train_set = TensorDataset(images[:1437], labels[:1437])
test_set = TensorDataset(images[1437:], labels[1437:])


class Net(nn.Sequential):
    """One hidden layer."""

    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
