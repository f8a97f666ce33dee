"""Trains a small convolutional network on the digits of the package; keeps the best weights, and stops early."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import samestep
from datasets import digits


class Net(nn.Module):
    """Smooth functions only, as in LeNet: with relu or max pooling, rounding grows from step to step."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.fc1 = nn.Linear(32 * 4 * 4, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        x = x.unsqueeze(1).float() / 16
        x = torch.tanh(self.conv1(x))
        x = F.avg_pool2d(torch.tanh(self.conv2(x)), 2)
        return self.fc2(torch.tanh(self.fc1(x.flatten(1))))


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--data-dir", help="folder of all of UCI's digits (default: those of the package)")
parser.add_argument("--epochs", type=int, default=10, help="passes over the training images (default: 10)")
parser.add_argument("--batch-size", type=int, default=32, help="images in one step (default: 32)")
parser.add_argument("--seed", type=int, default=0, help="of the first weights and the order (default: 0)")
parser.add_argument("--lr", type=float, default=0.05, help="learning rate (default: 0.05)")
parser.add_argument(
    "--patience", type=int, default=3, help="epochs without a better one before the end (default: 3)"
)
parser.add_argument("--dry-run", action="store_true", help="one step and one test batch, then stop")
args = parser.parse_args()

torch.manual_seed(args.seed)
device = samestep.init().device
train = samestep.loader(digits(args.data_dir, train=True), args.batch_size, shuffle=True)
test = samestep.loader(digits(args.data_dir, train=False), batch_size=2000)
model = samestep.replicate(Net().to(device))
optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
seen = {"best": 0.0, "since": 0}
checkpoint = samestep.Checkpoint("commits", model=model, optimizer=optimizer, train=train, seen=seen)
checkpoint.resume()

for epoch in train.epochs(args.epochs):
    if seen["since"] == args.patience:
        break
    model.train()
    for x, y in train:
        x, y = x.to(device), y.to(device)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        checkpoint.step()
        if args.dry_run:
            break

    model.eval()
    correct = 0
    with torch.no_grad():
        for x, y in test:
            x, y = x.to(device), y.to(device)
            correct += (model(x).argmax(1) == y).sum().item()
    accuracy = samestep.sum(correct) / len(test.dataset)
    print(f"epoch {epoch + 1}: {accuracy:.2%}")
    seen["since"] += 1
    if accuracy > seen["best"]:
        seen["best"], seen["since"] = accuracy, 0
        samestep.save("best.pt", model.state_dict())
    if args.dry_run:
        break

checkpoint.finish()
print(f"best {seen['best']:.2%}")
