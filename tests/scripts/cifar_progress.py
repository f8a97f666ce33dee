"""kuangliu's CIFAR loop: BatchNorm, a progress line for each batch, accuracy of the epoch from its share.

verdict: printed
printed: train loss
printed: test acc
remark: batch
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(0)
device = samestep.init().device
images, labels = torch.randn(40, 3, 6, 6), torch.randint(0, 4, (40,))
trainloader = samestep.loader(TensorDataset(images[:24], labels[:24]), 8, shuffle=True)
testloader = samestep.loader(TensorDataset(images[24:], labels[24:]), 8)
net = nn.Sequential(
    nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Linear(64, 4)
)
net = samestep.replicate(net.to(device))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
for epoch in range(2):
    net.train()
    train_loss = correct = total = 0
    for batch_idx, (inputs, targets) in enumerate(trainloader):
        optimizer.zero_grad()
        outputs = net(inputs)
        loss = criterion(outputs, targets)
        loss.backward()
        optimizer.step()
        train_loss += loss.item()
        total += targets.size(0)
        correct += outputs.max(1)[1].eq(targets).sum().item()
        print(
            f"batch {batch_idx}: Loss {train_loss / (batch_idx + 1):.3f} | Acc {100.0 * correct / total:.3f}"
        )
    print(f"train loss {train_loss / len(trainloader):.4f}")
    net.eval()
    correct = total = 0
    with torch.no_grad():
        for inputs, targets in testloader:
            total += targets.size(0)
            correct += net(inputs).max(1)[1].eq(targets).sum().item()
    print(f"test acc {correct}/{total}")
    scheduler.step()
