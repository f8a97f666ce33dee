import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from lightning.fabric import Fabric

fabric = Fabric(devices=2, accelerator="cpu")
fabric.launch()
print = fabric.print

torch.manual_seed(11)
training_data = TensorDataset(torch.rand(60, 1, 4, 4), torch.randint(0, 5, (60,)))
test_data = TensorDataset(torch.rand(26, 1, 4, 4), torch.randint(0, 5, (26,)))
batch_size = 8 // fabric.world_size

# Create data loaders.
train_dataloader = DataLoader(training_data, batch_size=batch_size)
test_dataloader = DataLoader(test_data, batch_size=batch_size)

for X, y in test_dataloader:
    print(f"Shape of X [N, C, H, W]: {X.shape[1:]}")
    print(f"dtype of y: {y.dtype}")
    break

train_dataloader, test_dataloader = fabric.setup_dataloaders(train_dataloader, test_dataloader)
device = fabric.device.type
print(f"Using {device} device")


# Define model
class NeuralNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.flatten = nn.Flatten()
        self.linear_relu_stack = nn.Sequential(nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 5))

    def forward(self, x):
        x = self.flatten(x)
        logits = self.linear_relu_stack(x)
        return logits


model = NeuralNetwork()
print(model)

loss_fn = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-1)
model, optimizer = fabric.setup(model, optimizer)


def train(dataloader, model, loss_fn, optimizer):
    size = len(dataloader.dataset)
    model.train()
    for batch, (X, y) in enumerate(dataloader):
        # Compute prediction error
        pred = model(X)
        loss = loss_fn(pred, y)

        # Backpropagation
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

        if batch % 3 == 0:
            loss = fabric.all_reduce(loss.detach()).item()
            current = (batch + 1) * len(X) * fabric.world_size
            print(f"loss: {loss:>7f}  [{current:>5d}/{size:>5d}]")


def test(dataloader, model, loss_fn):
    size = len(dataloader.dataset)
    num_batches = len(dataloader)
    model.eval()
    test_loss, correct = 0, 0
    with torch.no_grad():
        for X, y in dataloader:
            pred = model(X)
            test_loss += loss_fn(pred, y).item()
            correct += (pred.argmax(1) == y).type(torch.float).sum().item()
    test_loss = fabric.all_reduce(torch.tensor(test_loss)).item() / num_batches
    correct = fabric.all_reduce(torch.tensor(correct), reduce_op="sum").item() / size
    print(f"Test Error: \n Accuracy: {(100 * correct):>0.1f}%, Avg loss: {test_loss:>8f} \n")


epochs = 2
for t in range(epochs):
    print(f"Epoch {t + 1}\n-------------------------------")
    train(train_dataloader, model, loss_fn, optimizer)
    test(test_dataloader, model, loss_fn)
print("Done!")
fabric.save("model.pth", model.state_dict())
print("Saved PyTorch Model State to model.pth")
