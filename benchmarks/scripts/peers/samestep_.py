import torch
from torch.nn import functional as F
from work import BATCH, EPOCHS, Net, notes, test_set, train_set

import samestep

torch.manual_seed(0)
train = samestep.loader(train_set, batch_size=BATCH, shuffle=True)
test = samestep.loader(test_set, batch_size=500)
model = samestep.replicate(Net())
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
    accuracy = samestep.sum(correct) / len(test_set)
    print(f"epoch {epoch}: {accuracy:.2%}")
if samestep.init().rank == 0:
    notes.end(accuracy, model)
