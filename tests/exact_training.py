"""What test_exact trains at every size: a convolutional net and a transformer; prints two digests of all there is."""

import hashlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep


def digest(model, optimizer, metrics):
    found = hashlib.sha256(repr(metrics).encode())
    tensors = [*model.state_dict().values()]
    for state in optimizer.state_dict()["state"].values():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    for tensor in tensors:
        found.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


class Convolutional(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout2d(0.2))
        self.head = nn.Sequential(
            nn.Flatten(), nn.Linear(288, 32), nn.BatchNorm1d(32), nn.Dropout(0.5), nn.Linear(32, 5)
        )
        self.register_buffer("brightness", torch.zeros(6, 6))
        self.sometimes, self.never = nn.Conv2d(8, 8, 1), nn.Linear(4, 4)

    def forward(self, x):
        found = self.features(x)
        self.brightness = 0.9 * self.brightness + 0.1 * found.detach().mean((0, 1))
        if x[0, 0, 0, 0] > 0.7:
            found = self.sometimes(found)
        return self.head(found - self.brightness)


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.out = nn.Linear(32, 20)

    def forward(self, x):
        return self.out(self.layer(self.embedding(x)))


def train_convolutional():
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(100, 1, 8, 8, generator=generator), torch.randint(0, 5, (100,), generator=generator)
    )
    train = samestep.steps(data, 32, microbatch=4, shuffle=True)
    model = samestep.replicate(Convolutional(), exact=True, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    metrics = []
    for _ in train.epochs(3):
        for step in train:
            losses = []
            for x, y in step:
                loss = F.cross_entropy(model(x), y) + 1e-4 * sum(
                    parameter.abs().sum() for parameter in model.head.parameters()
                )
                loss.backward()
                losses.append(loss.item())
            metrics.append(
                (samestep.gather(losses), nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
            )
            optimizer.step()
            optimizer.zero_grad()
    return digest(model, optimizer, metrics)


def train_transformer():
    torch.manual_seed(0)
    data = TensorDataset(torch.randint(0, 20, (44, 12), generator=torch.Generator().manual_seed(2)))
    train = samestep.steps(data, 16, microbatch=2, shuffle=True, seed=5)
    model = samestep.replicate(Transformer(), exact=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    metrics = []
    for _ in train.epochs(2):
        for step in train:
            losses = []
            for (x,) in step:
                with torch.autocast("cpu", torch.bfloat16):
                    logits = model(x[:, :-1])
                loss = F.cross_entropy(logits.float().flatten(0, 1), x[:, 1:].flatten())
                scaler.scale(loss).backward()
                losses.append(loss.item())
            metrics.append(samestep.gather(losses))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return digest(model, optimizer, metrics)


if __name__ == "__main__":
    print(train_convolutional(), train_transformer())
