"""ResNet-50 and GPT-2: a step with samestep beside plain torch, or DistributedDataParallel, in turns."""

import os
import statistics
import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep


def block(inside, middle, stride):
    """ResNet's bottleneck."""
    outside = 4 * middle
    main = nn.Sequential(
        nn.Conv2d(inside, middle, 1, bias=False), nn.BatchNorm2d(middle), nn.ReLU(),
        nn.Conv2d(middle, middle, 3, stride, 1, bias=False), nn.BatchNorm2d(middle), nn.ReLU(),
        nn.Conv2d(middle, outside, 1, bias=False), nn.BatchNorm2d(outside),
    )  # fmt: skip
    beside = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))
    return Residual(main, beside if stride > 1 or inside != outside else nn.Identity(), nn.ReLU())


class Residual(nn.Module):
    def __init__(self, main, beside, after):
        super().__init__()
        self.main, self.beside, self.after = main, beside, after

    def forward(self, x):
        return self.after(self.main(x) + self.beside(x))


def resnet(depths, width):
    layers = [
        nn.Conv2d(3, width, 7, 2, 3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    inside = width
    for stage, depth in enumerate(depths):
        for number in range(depth):
            middle = width << stage
            layers.append(block(inside, middle, 2 if stage and not number else 1))
            inside = 4 * middle
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, 1000))


class Gpt2(nn.Module):
    def __init__(self, layers, width, heads, length, words):
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, 0.0, F.gelu, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.out = nn.Linear(width, words, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length), persistent=False)

    def forward(self, x):
        places = self.places.weight[: x.shape[1]]
        return self.out(self.layers(self.words(x) + places, mask=self.mask, is_causal=True)).flatten(0, 1)


world = samestep.init(backend=os.environ.get("SAMESTEP_TEST_BACKEND"))
on_gpu, rounds = world.device.type == "cuda", 8 if world.device.type == "cuda" else 2
many = world.size
torch.manual_seed(0)  # the data and the first weights are the same on every rank
cases = {
    "ResNet-50": (
        lambda: resnet((3, 4, 6, 3) if on_gpu else (1, 1, 1, 1), 64 if on_gpu else 4),
        TensorDataset(torch.randn(768 * many, 3, 224, 224), torch.randint(0, 1000, (768 * many,)))
        if on_gpu
        else TensorDataset(torch.randn(32 * many, 3, 32, 32), torch.randint(0, 1000, (32 * many,))),
        64 if on_gpu else 8,
    ),
    "GPT-2": (
        lambda: Gpt2(12, 768, 12, 512, 50_257) if on_gpu else Gpt2(1, 16, 2, 16, 100),
        TensorDataset(*2 * [torch.randint(0, 100, (192 * many, 512) if on_gpu else (32 * many, 16))]),
        16 if on_gpu else 8,
    ),
}


def epoch(model, optimizer, loader):
    """Seconds a step."""
    taken = 0
    if on_gpu:
        torch.cuda.synchronize()
    begun = time.perf_counter()
    for x, y in loader:
        x, y = x.to(world.device), y.to(world.device)
        with torch.autocast(world.device.type, torch.bfloat16):
            loss = F.cross_entropy(model(x), y.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        taken += 1
    if on_gpu:
        torch.cuda.synchronize()
    return (time.perf_counter() - begun) / taken


for name, (make, data, batch) in cases.items():
    torch.manual_seed(0)
    batch *= world.size
    ours, plain = make().to(world.device), make().to(world.device)
    if world.size > 1:
        plain = nn.parallel.DistributedDataParallel(plain)
    share = TensorDataset(*(column[world.rank :: world.size] for column in data.tensors))
    runs = {
        "samestep": (samestep.replicate(ours), samestep.loader(data, batch, shuffle=True)),
        "torch": (plain, torch.utils.data.DataLoader(share, batch // world.size, pin_memory=on_gpu)),
    }
    optimizers = {
        system: torch.optim.AdamW(model.parameters(), fused=on_gpu) for system, (model, _) in runs.items()
    }
    times = {system: [] for system in runs}
    for turn in range(rounds + 1):
        for system, (model, loader) in runs.items():
            seconds = epoch(model, optimizers[system], loader)
            if turn:
                times[system].append(seconds)
    ratio = statistics.median(mine / theirs for mine, theirs in zip(*times.values(), strict=True))
    if world.rank == 0:
        print(f"{name}: {1e3 * statistics.median(times['samestep']):.1f} ms a step, {ratio:.3f} of torch's")
