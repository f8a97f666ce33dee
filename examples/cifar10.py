"""Trains PyramidNet-110 or ResNet-20 on CIFAR-10, on any number of processes."""

import argparse
import time
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

import samestep
from datasets import CropAndFlip, cifar10, default_dir, head, workers


def centred(x):
    """Convert bytes to floats on the device: a quarter of the traffic, and no work for the loader."""
    return (x.float() - 121) / 64


def conv3x3(inputs, outputs, stride=1):
    return nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)


def widen(x, channels, stride):
    """A block's shortcut without weights: takes fewer pixels, and fills new channels with zeros."""
    if stride > 1:
        x = F.avg_pool2d(x, stride, ceil_mode=True)
    return F.pad(x, (0, 0, 0, 0, 0, channels - x.shape[1]))


class PyramidBlock(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.outputs, self.stride = outputs, stride
        self.bn1, self.conv1 = nn.BatchNorm2d(inputs), conv3x3(inputs, outputs, stride)
        self.bn2, self.conv2 = nn.BatchNorm2d(outputs), conv3x3(outputs, outputs)
        self.bn3 = nn.BatchNorm2d(outputs)

    def forward(self, x):
        out = self.conv1(self.bn1(x))
        out = self.bn3(self.conv2(F.relu(self.bn2(out))))
        return out + widen(x, self.outputs, self.stride)


class PyramidNet(nn.Module):
    """A network whose channels grow by alpha over all blocks; 110 layers are 3 x 18 blocks of two layers."""

    def __init__(self, depth=110, alpha=48, classes=10):
        super().__init__()
        blocks = (depth - 2) // 6
        widths = [round(16 + alpha * i / (3 * blocks)) for i in range(3 * blocks + 1)]
        self.conv, self.bn = conv3x3(3, 16), nn.BatchNorm2d(16)
        self.blocks = nn.Sequential(
            *(
                PyramidBlock(widths[i], widths[i + 1], stride=2 if i in (blocks, 2 * blocks) else 1)
                for i in range(3 * blocks)
            )
        )
        self.bn_out, self.fc = nn.BatchNorm2d(widths[-1]), nn.Linear(widths[-1], classes)

    def forward(self, x):
        x = self.blocks(self.bn(self.conv(centred(x))))
        return self.fc(F.relu(self.bn_out(x)).mean((2, 3)))


class ResidualBlock(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.outputs, self.stride = outputs, stride
        self.conv1, self.bn1 = conv3x3(inputs, outputs, stride), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = conv3x3(outputs, outputs), nn.BatchNorm2d(outputs)

    def forward(self, x):
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(out + widen(x, self.outputs, self.stride))


class ResNet(nn.Module):
    """The small ResNet of the CIFAR-10 experiments; 20 layers are 3 x 3 blocks of two layers."""

    def __init__(self, depth=20, classes=10):
        super().__init__()
        widths = [16] + [width for width in (16, 32, 64) for _ in range((depth - 2) // 6)]
        pairs = pairwise(widths)
        self.conv, self.bn = conv3x3(3, 16), nn.BatchNorm2d(16)
        self.blocks = nn.Sequential(*(ResidualBlock(a, b, stride=1 if a == b else 2) for a, b in pairs))
        self.fc = nn.Linear(64, classes)

    def forward(self, x):
        x = self.blocks(F.relu(self.bn(self.conv(centred(x)))))
        return self.fc(x.mean((2, 3)))


MODELS = {"pyramidnet": lambda args: PyramidNet(alpha=args.alpha), "resnet": lambda args: ResNet()}


def train(model, batches, optimizer):
    model.train()
    seen = {"loss": 0.0, "correct": 0, "images": 0}
    for x, y in batches:
        scores = model(x)
        loss = F.cross_entropy(scores, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        # Sums stay on the device: to read a number in each step would make the host wait for it.
        seen["loss"] += loss.detach() * len(y)
        seen["correct"] += (scores.argmax(1) == y).sum()
        seen["images"] += len(y)
    seen = samestep.sum({name: float(total) for name, total in seen.items()})
    return seen["loss"] / seen["images"], seen["correct"] / seen["images"]


@torch.no_grad()
def test(model, batches):
    model.eval()
    correct = 0
    for x, y in batches:
        correct += (model(x).argmax(1) == y).sum().item()
    return samestep.sum(correct) / len(batches.dataset)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="resnet", help="(default: resnet)")
    parser.add_argument("--alpha", type=int, default=48, help="PyramidNet's width; 270 is full (default: 48)")
    parser.add_argument("--data-dir", default=default_dir(), help="folder of CIFAR-10 (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=100, help="(default: 100)")
    parser.add_argument(
        "--batch-size", type=int, default=128, help="images in a step, of all processes (default: 128)"
    )
    parser.add_argument("--lr", type=float, default=0.1, help="first learning rate of SGD (default: 0.1)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, order and crops (default: 0)")
    parser.add_argument(
        "--workers", type=workers, default="auto", help="loading processes (default: by the cores at hand)"
    )
    parser.add_argument("--sync-batchnorm", action="store_true", help="BatchNorm over the whole batch (CUDA)")
    parser.add_argument("--dry-run", action="store_true", help="one step and one test batch, then stop")
    args = parser.parse_args()

    train_data, test_data = cifar10(args.data_dir, train=True), cifar10(args.data_dir, train=False)
    if args.dry_run:
        train_data, test_data = head(train_data, args.batch_size), head(test_data, args.batch_size)
        args.epochs = 1

    world = samestep.init()
    torch.manual_seed(args.seed)
    model = samestep.replicate(MODELS[args.model](args).to(world.device), sync_batchnorm=args.sync_batchnorm)
    train_batches = samestep.loader(
        CropAndFlip(train_data), args.batch_size, shuffle=True, seed=args.seed, num_workers=args.workers
    )
    test_batches = samestep.loader(test_data, 1000)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = CosineAnnealingLR(optimizer, args.epochs)

    for epoch in range(1, args.epochs + 1):
        began = time.perf_counter()
        loss, accuracy = train(model, train_batches, optimizer)
        speed = len(train_data) / (time.perf_counter() - began)
        scheduler.step()
        test_accuracy = test(model, test_batches)
        if world.rank == 0:
            print(
                f"epoch {epoch}: loss {loss:.4f}, accuracy {accuracy:.2%}, test {test_accuracy:.2%}, "
                f"{speed:.0f} images/s"
            )

    samestep.save(f"cifar10-{args.model}.pt", model.state_dict())


if __name__ == "__main__":
    main()
