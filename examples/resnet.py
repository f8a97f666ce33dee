"""Trains ResNet-50 or ResNet-101 on a folder of images, or on synthetic ones, on any number of processes."""

import argparse
import math
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import samestep
from datasets import ImageFolder, head, positive, synthetic_images, workers


class Bottleneck(nn.Module):
    def __init__(self, inputs, width, stride=1):
        super().__init__()
        outputs = 4 * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride > 1 or inputs != outputs:
            shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(outputs))
        nn.init.zeros_(self.bn3.weight)

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        out = F.relu(self.bn2(self.conv2(out)), inplace=True)
        out = self.bn3(self.conv3(out))
        out += x if self.downsample is None else self.downsample(x)
        return F.relu(out, inplace=True)


class ResNet(nn.Module):
    """The ResNet of bottleneck blocks; its parameters have the names of torchvision's."""

    def __init__(self, blocks, classes):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.layer1 = self._layer(64, 64, blocks[0], 1)
        self.layer2 = self._layer(256, 128, blocks[1], 2)
        self.layer3 = self._layer(512, 256, blocks[2], 2)
        self.layer4 = self._layer(1024, 512, blocks[3], 2)
        self.fc = nn.Linear(2048, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    @staticmethod
    def _layer(inputs, width, count, stride):
        more = [Bottleneck(4 * width, width) for _ in range(count - 1)]
        return nn.Sequential(Bottleneck(inputs, width, stride), *more)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1((x.float() - 115) / 58)), inplace=True)
        x = F.max_pool2d(x, 3, 2, padding=1)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean((2, 3)))


BLOCKS = {"resnet50": (3, 4, 6, 3), "resnet101": (3, 4, 23, 3)}


def learning_rate(warmup, total):
    """A factor for each optimizer step: it rises linearly, then falls along a cosine."""
    return lambda step: (
        (step + 1) / warmup
        if step < warmup
        else (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup))) / 2
    )


def train(model, batches, optimizer, scheduler, device, bf16):
    model.train()
    loss_sum, images = torch.zeros((), device=device), 0
    for x, y in batches:
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        # The sum stays on the device: to read it in each step would make the host wait.
        loss_sum += loss.detach() * len(y)
        images += len(y)
    seen = samestep.sum({"loss": loss_sum.item(), "images": images})
    return seen["loss"] / seen["images"]


@torch.no_grad()
def test(model, batches, device, bf16):
    model.eval()
    correct = {"top 1": 0, "top 5": 0}
    for x, y in batches:
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            scores = model(x)
        best = scores.topk(min(5, scores.shape[1])).indices == y[:, None]
        correct["top 1"] += best[:, 0].sum().item()
        correct["top 5"] += best.sum().item()
    return {name: total / len(batches.dataset) for name, total in samestep.sum(correct).items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=BLOCKS, default="resnet50", help="(default: resnet50)")
    parser.add_argument(
        "--data-dir", help="folder with train/<class>/ and val/<class>/ (default: synthetic images)"
    )
    parser.add_argument("--image-size", type=positive, default=224, help="pixels of a side (default: 224)")
    parser.add_argument(
        "--synthetic-images", type=positive, default=1024, help="how many there are (default: 1024)"
    )
    parser.add_argument("--epochs", type=int, default=90, help="(default: 90)")
    parser.add_argument(
        "--batch-size", type=int, default=256, help="images in a step, of all processes (default: 256)"
    )
    parser.add_argument("--lr", type=float, default=0.1, help="highest learning rate of SGD (default: 0.1)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, order and crops (default: 0)")
    parser.add_argument(
        "--workers", type=workers, default="auto", help="loading processes (default: by the cores at hand)"
    )
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16 where that is safe")
    parser.add_argument("--sync-batchnorm", action="store_true", help="BatchNorm over the whole batch (CUDA)")
    parser.add_argument("--dry-run", action="store_true", help="one step and one test batch, then stop")
    args = parser.parse_args()

    if args.data_dir:
        train_data = ImageFolder(args.data_dir, args.image_size, train=True)
        test_data = ImageFolder(args.data_dir, args.image_size, train=False)
        classes = len(train_data.classes)
    else:
        classes = 1000
        train_data = test_data = synthetic_images(args.synthetic_images, args.image_size, classes)
    if args.dry_run:
        train_data, test_data = head(train_data, args.batch_size), head(test_data, args.batch_size)
        args.epochs = 1

    world = samestep.init()
    torch.manual_seed(args.seed)
    model = ResNet(BLOCKS[args.model], classes).to(world.device, memory_format=torch.channels_last)
    model = samestep.replicate(model, sync_batchnorm=args.sync_batchnorm)
    train_batches = samestep.loader(
        train_data, args.batch_size, shuffle=True, seed=args.seed, num_workers=args.workers
    )
    test_batches = samestep.loader(test_data, args.batch_size, num_workers=args.workers)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4, nesterov=True)
    warmup, total = 5 * len(train_batches), args.epochs * len(train_batches)
    scheduler = LambdaLR(optimizer, learning_rate(warmup, total))

    for epoch in range(1, args.epochs + 1):
        began = time.perf_counter()
        loss = train(model, train_batches, optimizer, scheduler, world.device, args.bf16)
        speed = len(train_data) / (time.perf_counter() - began)
        result = test(model, test_batches, world.device, args.bf16)
        if world.rank == 0:
            print(
                f"epoch {epoch}: loss {loss:.4f}, top 1 {result['top 1']:.2%}, top 5 {result['top 5']:.2%}, "
                f"{speed:.1f} images/s"
            )

    samestep.save(f"{args.model}.pt", model.state_dict())


if __name__ == "__main__":
    main()
