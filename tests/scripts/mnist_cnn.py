"""pytorch/examples mnist: a network with dropout, train and test functions, a schedule by epochs.

verdict: with_same
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(36, 16)
        self.fc2 = nn.Linear(16, 10)

    def forward(self, x):
        x = torch.tanh(self.conv1(x))
        x = self.dropout1(F.avg_pool2d(x, 2))
        x = self.dropout2(torch.tanh(self.fc1(torch.flatten(x, 1))))
        return F.log_softmax(self.fc2(x), dim=1)


def train(model, device, loader, optimizer):
    model.train()
    for data, target in loader:
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()


def test(model, device, loader):
    model.eval()
    loss = correct = 0
    with torch.no_grad():
        for data, target in loader:
            data, target = data.to(device), target.to(device)
            output = model(data)
            loss += F.nll_loss(output, target, reduction="sum").item()
            correct += output.argmax(dim=1).eq(target).sum().item()
    count = len(loader.dataset)
    loss, correct = samestep.sum(loss), samestep.sum(correct)
    print(
        f"Test set: Average loss: {loss / count:.4f}, Accuracy: {correct}/{count} ({100.0 * correct / count:.0f}%)"
    )


def main():
    torch.manual_seed(1)
    device = samestep.init().device
    images, labels = torch.rand(44, 1, 8, 8), torch.randint(0, 10, (44,))
    train_loader = samestep.loader(TensorDataset(images[:30], labels[:30]), 8, shuffle=True)
    test_loader = samestep.loader(TensorDataset(images[30:], labels[30:]), 10)
    model = samestep.replicate(Net().to(device))
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    for _ in range(2):
        train(model, device, train_loader, optimizer)
        test(model, device, test_loader)
        scheduler.step()
    samestep.save("mnist_cnn.pt", model.state_dict())


if __name__ == "__main__":
    main()
