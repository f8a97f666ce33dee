import torch
import torch.nn as nn
from torch.autograd import Variable
from torch.utils.data import DataLoader, TensorDataset

use_cuda = torch.cuda.is_available()
torch.manual_seed(2)
train_loader = DataLoader(TensorDataset(torch.rand(40, 6), torch.randint(0, 3, (40,))), batch_size=8, shuffle=True)
val_loader = DataLoader(TensorDataset(torch.rand(22, 6), torch.randint(0, 3, (22,))), batch_size=8)
model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 3))
if use_cuda:
    model = model.cuda()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters())
train_losses, val_accs = [], []
best_loss = 1e9
for epoch in range(3):
    total_loss = 0
    running_acc = 0
    for i, (data, target) in enumerate(train_loader):
        if use_cuda:
            data, target = data.cuda(), target.cuda()
        data, target = Variable(data), Variable(target)
        optimizer.zero_grad()
        out = model(data)
        loss = criterion(out, target)
        loss.backward(retain_graph=True)
        optimizer.step()
        total_loss += loss
        running_acc += (out.argmax(1) == target).float().mean()
        if loss.item() < best_loss:
            best_loss = loss.item()
            torch.save(model.state_dict(), "best.pt")
    print("Epoch", epoch, "loss", loss, "acc", running_acc / len(train_loader))
    train_losses.append(total_loss.item() / len(train_loader))
    correct = 0
    val_loss = sum(criterion(model(a), b) for a, b in val_loader) / len(val_loader)
    for a, b in val_loader:
        pred = model(a).data.max(1, keepdim=True)[1]
        correct += pred.eq(b.data.view_as(pred)).cpu().sum()
    val_accs.append(100. * correct / len(val_loader.dataset))
    print('val', val_loss.item(), val_accs[-1].item(), correct.double() / 22)
