import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader
from work import BATCH, EPOCHS, Net, notes, test_set, train_set

torch.manual_seed(0)
train = DataLoader(train_set, batch_size=BATCH, shuffle=True)
test = DataLoader(test_set, batch_size=500)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for epoch in range(EPOCHS):
    model.train()
    for x, y in train:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        notes.step()
    model.eval()
    correct = 0
    with torch.no_grad():
        for x, y in test:
            correct += (model(x).argmax(1) == y).sum().item()
    accuracy = correct / len(test_set)
    print(f"epoch {epoch}: {accuracy:.2%}")
notes.end(accuracy, model)
