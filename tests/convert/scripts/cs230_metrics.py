import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import logging
import copy

logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
logger = logging.getLogger(__name__)


class RunningAverage:
    """A simple class that maintains the running average of a quantity"""

    def __init__(self):
        self.steps = 0
        self.total = 0

    def update(self, val):
        self.total += val
        self.steps += 1

    def __call__(self):
        return self.total / float(self.steps)


def accuracy(outputs, labels):
    outputs = outputs.argmax(1)
    return (outputs == labels).sum().item() / float(labels.size(0))


metrics = {"accuracy": accuracy}


def evaluate(model, loss_fn, dataloader, metrics):
    model.eval()
    summ = []
    with torch.no_grad():
        for data_batch, labels_batch in dataloader:
            output_batch = model(data_batch)
            loss = loss_fn(output_batch, labels_batch)
            summary_batch = {m: metrics[m](output_batch, labels_batch) for m in metrics}
            summary_batch["loss"] = loss.item()
            summ.append(summary_batch)
    metrics_mean = {m: sum(s[m] for s in summ) / len(summ) for m in summ[0]}
    logger.info("- Eval metrics : " + " ; ".join("{}: {:05.3f}".format(k, v) for k, v in metrics_mean.items()))
    return metrics_mean


def train(model, optimizer, loss_fn, dataloader):
    model.train()
    loss_avg = RunningAverage()
    for i, (train_batch, labels_batch) in enumerate(dataloader):
        output = model(train_batch)
        loss = loss_fn(output, labels_batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss_avg.update(loss.item())
    logger.info("- Train loss: {:05.3f}".format(loss_avg()))


torch.manual_seed(3)
X = torch.randn(50, 5)
Y = torch.randint(0, 3, (50,))
train_dl = DataLoader(TensorDataset(X, Y), batch_size=8, shuffle=True)
val_dl = DataLoader(TensorDataset(X[:26], Y[:26]), batch_size=8)
net = nn.Sequential(nn.Linear(5, 10), nn.Tanh(), nn.Linear(10, 3))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
best = 0.0
best_state = None
for epoch in range(3):
    logger.info("Epoch {}/{}".format(epoch + 1, 3))
    train(net, optimizer, nn.CrossEntropyLoss(), train_dl)
    val_metrics = evaluate(net, nn.CrossEntropyLoss(), val_dl, metrics)
    if val_metrics["accuracy"] >= best:
        logger.info("- Found new best accuracy")
        best = val_metrics["accuracy"]
        best_state = copy.deepcopy(net.state_dict())
net.load_state_dict(best_state)
torch.save(net.state_dict(), "best.pth")
print("best", best)
