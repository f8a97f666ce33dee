"""yunjey's feed-forward network: the accuracy is everyone's, progress lines are one rank's.

verdict: same
remark: Loss:
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(3)
device = samestep.init().device
num_epochs = 2
data = TensorDataset(torch.rand(40, 12), torch.randint(0, 4, (40,)))
train_loader = samestep.loader(data, batch_size=10, shuffle=True)
test_loader = samestep.loader(data, batch_size=10)
model = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 4)).to(device)
model = samestep.replicate(model)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
total_step = len(train_loader)
for epoch in range(num_epochs):
    for i, (images, labels) in enumerate(train_loader):
        images = images.reshape(-1, 12).to(device)
        loss = criterion(model(images), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (i + 1) % 2 == 0:
            print(f"Epoch [{epoch + 1}/{num_epochs}], Step [{i + 1}/{total_step}], Loss: {loss.item():.4f}")
with torch.no_grad():
    correct = total = 0
    for images, labels in test_loader:
        predicted = model(images.to(device)).argmax(1)
        total += labels.size(0)
        correct += (predicted == labels.to(device)).sum().item()
    print(f"Accuracy: {100 * samestep.sum(correct) / samestep.sum(total)} %")
