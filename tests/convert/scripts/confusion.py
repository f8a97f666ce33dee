import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

num_classes = 3


def confusion_matrix(model, loader):
    cm = torch.zeros(num_classes, num_classes, dtype=torch.int64)
    model.eval()
    with torch.no_grad():
        for inputs, targets in loader:
            preds = torch.argmax(model(inputs), dim=1)
            for t, p in zip(targets.view(-1), preds.view(-1)):
                cm[t.long(), p.long()] += 1
    return cm


def per_class(model, loader):
    class_correct = list(0.0 for i in range(num_classes))
    class_total = list(0.0 for i in range(num_classes))
    with torch.no_grad():
        for images, labels in loader:
            _, predicted = torch.max(model(images), 1)
            c = (predicted == labels).squeeze()
            for i in range(len(labels)):
                label = labels[i]
                class_correct[label] += c[i].item()
                class_total[label] += 1
    for i in range(num_classes):
        print("Accuracy of %5s : %2d %%" % (i, 100 * class_correct[i] / class_total[i]))


torch.manual_seed(24)
x, y = torch.randn(70, 5), torch.randint(0, num_classes, (70,))
train_loader = DataLoader(TensorDataset(x[:40], y[:40]), batch_size=10, shuffle=True)
test_loader = DataLoader(TensorDataset(x[40:], y[40:]), batch_size=12)
model = nn.Linear(5, num_classes)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for epoch in range(3):
    for inputs, targets in train_loader:
        loss = nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
cm = confusion_matrix(model, test_loader)
print(cm)
print("recall", (cm.diag().float() / cm.sum(1)).tolist())
per_class(model, test_loader)
torch.save(model.state_dict(), "linear.pt")
