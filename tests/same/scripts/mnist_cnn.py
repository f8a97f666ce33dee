"""A convolutional network for digits with two dropouts, as in pytorch/examples, and an evaluation each epoch."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(1)
world = samestep.init()
images, labels = torch.rand(60, 1, 8, 8), torch.randint(0, 10, (60,))
train = samestep.loader(TensorDataset(images[:45], labels[:45]), batch_size=8, shuffle=True)
test = samestep.loader(TensorDataset(images[45:], labels[45:]), batch_size=7)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 8, 3)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(32, 16), nn.Linear(16, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        x = torch.flatten(self.dropout1(x), 1)
        return F.log_softmax(self.fc2(self.dropout2(F.relu(self.fc1(x)))), dim=1)


model = samestep.replicate(Net().to(world.device), same=True)
optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
for epoch in range(3):
    model.train()
    for x, y in train:
        optimizer.zero_grad()
        loss = F.nll_loss(model(x), y)
        loss.backward()
        optimizer.step()
        print("loss", samestep.mean(loss.item()))
    model.eval()
    missed, correct = 0.0, 0
    with torch.no_grad():
        for x, y in test:
            output = model(x)
            missed += F.nll_loss(output, y, reduction="sum").item()
            correct += output.argmax(1).eq(y).sum().item()
    print(epoch, samestep.sum(missed) / 15, samestep.sum(correct))
    scheduler.step()
samestep.save("weights.pt", model.state_dict())
