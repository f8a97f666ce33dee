import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

torch.manual_seed(22)
np.random.seed(22)
dataset = TensorDataset(torch.randn(45, 5), torch.randn(45, 1))
indices = np.random.permutation(45)
folds = np.array_split(indices, 3)
scores = []


def reset_weights(m):
    if hasattr(m, "reset_parameters"):
        m.reset_parameters()


for fold in range(3):
    train_ids = np.concatenate([f for i, f in enumerate(folds) if i != fold])
    trainloader = DataLoader(dataset, batch_size=7, sampler=SubsetRandomSampler(train_ids.tolist()))
    testloader = DataLoader(dataset, batch_size=7, sampler=SubsetRandomSampler(folds[fold].tolist()))
    network = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
    network.apply(reset_weights)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    for epoch in range(2):
        current_loss = 0.0
        for i, data in enumerate(trainloader, 0):
            inputs, targets = data
            optimizer.zero_grad()
            loss = nn.functional.l1_loss(network(inputs), targets)
            loss.backward()
            optimizer.step()
            current_loss += loss.item()
            if i % 3 == 2:
                print("Loss after mini-batch %5d: %.3f" % (i + 1, current_loss / 3))
                current_loss = 0.0
    torch.save(network.state_dict(), f"./model-fold-{fold}.pth")
    total = 0
    with torch.no_grad():
        for data in testloader:
            inputs, targets = data
            total += nn.functional.l1_loss(network(inputs), targets, reduction="sum").item()
    scores.append(total / len(folds[fold]))
    print(f"fold {fold}: {scores[-1]:.4f}")
print(f"Average: {sum(scores) / len(scores):.4f}")
