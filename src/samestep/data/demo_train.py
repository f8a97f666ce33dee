"""What `samestep demo` runs: an ordinary training script, whose results do not depend on the processes."""
# mypy: disallow-untyped-calls=False

import argparse
import hashlib
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep
from samestep.data import digits

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--out", default="demo.pt", help="the file for weights and results (default: demo.pt)")
args = parser.parse_args()

torch.manual_seed(0)
device = samestep.init().device
images, labels = digits()
test_part = torch.arange(len(images)) % 5 == 0
# Each sample includes its index, so that the order of samples can be compared.
data = TensorDataset(images.unsqueeze(1) / 16, labels.long(), torch.arange(len(images)))
train = samestep.steps(TensorDataset(*data[~test_part]), batch_size=192, microbatch=48, shuffle=True)
test = samestep.loader(TensorDataset(*data[test_part]), batch_size=360)

net = nn.Sequential(
    *(nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
    *(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
    *(nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
    *(nn.Flatten(), nn.Dropout(0.3), nn.Linear(64 * 2 * 2, 10)),
)
model = samestep.replicate(net.to(device), exact=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

order = hashlib.sha256()
steps, seconds = 0, []
for epoch in train.epochs(args.epochs):
    model.train()
    began = time.perf_counter()
    for step in train:
        seen = []
        for x, y, index in step:
            F.cross_entropy(model(x), y).backward()
            seen += index.tolist()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        order.update(str(samestep.gather(seen)).encode())
    seconds.append(time.perf_counter() - began)

    model.eval()
    with torch.no_grad():
        correct = samestep.sum(sum(int((model(x).argmax(1) == y).sum()) for x, y, _ in test))
    print(f"epoch {epoch + 1} of {args.epochs}: {correct / len(test.dataset):.2%}", flush=True)

samestep.save(
    args.out,
    {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "steps": steps,
        "order": order.hexdigest(),
        "correct": correct,
        "tested": len(test.dataset),
        "trained": len(train.dataset),
        "seconds": seconds,
    },
)
