import os

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


class Trainer:
    def __init__(self, model, train_set, test_set, lr=0.05, batch_size=8):
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = model.to(self.device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=0.9)
        self.criterion = nn.CrossEntropyLoss()
        self.train_loader = DataLoader(train_set, batch_size=batch_size, shuffle=True)
        self.test_loader = DataLoader(test_set, batch_size=batch_size)
        self.best_acc = 0.0
        self.history = []

    def _train_epoch(self, epoch):
        self.model.train()
        running_loss, correct, total = 0.0, 0, 0
        for i, (inputs, targets) in enumerate(self.train_loader):
            loss, outputs = self._step(inputs, targets)
            running_loss += loss
            correct += (outputs.argmax(1) == targets).sum().item()
            total += len(targets)
            if i % 3 == 0:
                self.log(f"  [{epoch}:{i}] loss={loss:.4f}")
        return running_loss / len(self.train_loader), correct / total

    def _step(self, inputs, targets):
        inputs, targets = inputs.to(self.device), targets.to(self.device)
        self.optimizer.zero_grad()
        outputs = self.model(inputs)
        loss = self.criterion(outputs, targets)
        loss.backward()
        self.optimizer.step()
        return loss.item(), outputs

    @torch.no_grad()
    def _test_epoch(self):
        self.model.eval()
        self.correct, self.seen, loss_sum = 0, 0, 0.0
        for inputs, targets in self.test_loader:
            inputs, targets = inputs.to(self.device), targets.to(self.device)
            outputs = self.model(inputs)
            loss_sum += self.criterion(outputs, targets).item() * inputs.size(0)
            self.correct += outputs.argmax(1).eq(targets).sum().item()
            self.seen += targets.size(0)
        return loss_sum / self.seen, self.correct / self.seen

    def log(self, message):
        print(message)

    def save(self, path):
        torch.save(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "best": self.best_acc,
            },
            path,
        )

    def fit(self, epochs):
        for epoch in range(epochs):
            train_loss, train_acc = self._train_epoch(epoch)
            test_loss, test_acc = self._test_epoch()
            self.history.append((train_loss, test_loss))
            self.log(f"{epoch}: train {train_loss:.4f}/{train_acc:.3f} test {test_loss:.4f}/{test_acc:.3f}")
            if test_acc >= self.best_acc:
                self.best_acc = test_acc
                self.save(os.path.join(".", "best.pt"))
        return self


def main():
    torch.manual_seed(21)
    x, y = torch.randn(60, 6), torch.randint(0, 3, (60,))
    net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Dropout(0.1), nn.Linear(12, 3))
    Trainer(net, TensorDataset(x[:41], y[:41]), TensorDataset(x[41:], y[41:])).fit(2)


if __name__ == "__main__":
    main()
