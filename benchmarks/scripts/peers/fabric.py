import torch
from lightning.fabric import Fabric
from torch.nn import functional as F
from torch.utils.data import DataLoader
from work import BATCH, EPOCHS, Net, notes, test_set, train_set

fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
torch.manual_seed(0)
train = DataLoader(train_set, batch_size=BATCH // fabric.world_size, shuffle=True)
test = DataLoader(test_set, batch_size=500 // fabric.world_size)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
model, optimizer = fabric.setup(model, optimizer)
train, test = fabric.setup_dataloaders(train, test)
for epoch in range(EPOCHS):
    model.train()
    for x, y in train:
        fabric.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        notes.step()
    model.eval()
    correct = torch.zeros(1)
    with torch.no_grad():
        for x, y in test:
            correct += (model(x).argmax(1) == y).sum()
    accuracy = fabric.all_reduce(correct, reduce_op="sum").item() / len(test_set)
    fabric.print(f"epoch {epoch}: {accuracy:.2%}")
if fabric.is_global_zero:
    notes.end(accuracy, model.module)
