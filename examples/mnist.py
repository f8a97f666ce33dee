"""Trains the network of PyTorch's MNIST example, with its flags, or an MLP, on any number of processes."""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import StepLR

import samestep
from datasets import default_dir, head, mnist, positive


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(64 * 12 * 12, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x):
        x = (x.unsqueeze(1).float() / 255 - 0.1307) / 0.3081
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = self.dropout1(x).flatten(1)
        x = self.dropout2(F.relu(self.fc1(x)))
        return self.fc2(x)


class MLP(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))

    def forward(self, x):
        return super().forward((x.float() / 255 - 0.1307) / 0.3081)


MODELS = {"cnn": Net, "mlp": MLP}


def train(args, model, batches, optimizer, epoch, world):
    model.train()
    for step, (x, y) in enumerate(batches):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % args.log_interval == 0:
            # Every rank calls mean, which is collective; one rank prints.
            mean_loss = samestep.mean(loss.item())
            if world.rank == 0:
                print(f"epoch {epoch} [{step * args.batch_size}/{len(batches.dataset)}] loss {mean_loss:.4f}")


@torch.no_grad()
def test(model, batches):
    model.eval()
    seen = {"loss": 0.0, "correct": 0}
    for x, y in batches:
        scores = model(x)
        seen["loss"] += F.cross_entropy(scores, y, reduction="sum").item()
        seen["correct"] += (scores.argmax(1) == y).sum().item()
    return {name: total / len(batches.dataset) for name, total in samestep.sum(seen).items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="cnn", help="(default: cnn)")
    parser.add_argument(
        "--data-dir", default=default_dir(), help="folder of the IDX files (default: %(default)s)"
    )
    parser.add_argument(
        "--batch-size", type=int, default=64, help="images in a step, of all processes (default: 64)"
    )
    parser.add_argument(
        "--test-batch-size", type=positive, default=1000, help="the same for the test (default: 1000)"
    )
    parser.add_argument("--epochs", type=int, default=14, help="(default: 14)")
    parser.add_argument("--lr", type=float, default=1.0, help="learning rate of Adadelta (default: 1.0)")
    parser.add_argument("--gamma", type=float, default=0.7, help="its factor after each epoch (default: 0.7)")
    parser.add_argument("--seed", type=int, default=1, help="of weights, order and dropout (default: 1)")
    parser.add_argument(
        "--log-interval", type=positive, default=100, help="steps between two lines (default: 100)"
    )
    parser.add_argument("--save-model", action="store_true", help="write mnist.pt at the end")
    parser.add_argument("--dry-run", action="store_true", help="one step and one test batch, then stop")
    args = parser.parse_args()

    train_data, test_data = mnist(args.data_dir, train=True), mnist(args.data_dir, train=False)
    if args.dry_run:
        train_data, test_data = head(train_data, args.batch_size), head(test_data, args.test_batch_size)
        args.epochs = 1

    world = samestep.init()
    torch.manual_seed(args.seed)
    model = samestep.replicate(MODELS[args.model]().to(world.device))
    train_batches = samestep.loader(train_data, args.batch_size, shuffle=True, seed=args.seed)
    test_batches = samestep.loader(test_data, args.test_batch_size)
    optimizer = torch.optim.Adadelta(model.parameters(), args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)

    for epoch in range(1, args.epochs + 1):
        began = time.perf_counter()
        train(args, model, train_batches, optimizer, epoch, world)
        scheduler.step()
        result = test(model, test_batches)
        if world.rank == 0:
            seconds, loss, accuracy = time.perf_counter() - began, result["loss"], result["correct"]
            print(f"epoch {epoch}: test loss {loss:.4f}, accuracy {accuracy:.2%}, {seconds:.1f} s")

    if args.save_model:
        samestep.save("mnist.pt", model.state_dict())


if __name__ == "__main__":
    main()
