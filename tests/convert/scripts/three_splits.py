import argparse
import random
import sys
import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

parser = argparse.ArgumentParser(description="toy")
parser.add_argument("--batch-size", type=int, default=8, metavar="N")
parser.add_argument("--test-batch-size", type=int, default=10)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--no-cuda", action="store_true", default=False)
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--log-interval", type=int, default=2)
parser.add_argument("--valid-size", type=float, default=0.2)
args = parser.parse_args()
args.cuda = not args.no_cuda and torch.cuda.is_available()
torch.manual_seed(args.seed)
np.random.seed(args.seed)
if args.cuda:
    torch.cuda.manual_seed(args.seed)
kwargs = {"num_workers": 0, "pin_memory": True} if args.cuda else {}
x = torch.randn(90, 7)
t = (x[:, :2].sum(1) > 0).float()
train_data, test_data = TensorDataset(x[:64], t[:64]), TensorDataset(x[64:], t[64:])
num_train = len(train_data)
indices = list(range(num_train))
np.random.shuffle(indices)
split = int(np.floor(args.valid_size * num_train))
train_idx, valid_idx = indices[split:], indices[:split]
train_loader = DataLoader(train_data, batch_size=args.batch_size, sampler=SubsetRandomSampler(train_idx), **kwargs)
valid_loader = DataLoader(train_data, batch_size=args.batch_size, sampler=SubsetRandomSampler(valid_idx), **kwargs)
test_loader = DataLoader(test_data, batch_size=args.test_batch_size, **kwargs)
model = nn.Sequential(nn.Linear(7, 12), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, 1))
if args.cuda:
    model.cuda()
criterion = nn.BCEWithLogitsLoss()
optimizer = optim.SGD(model.parameters(), lr=0.1)
valid_loss_min = np.inf
for epoch in range(1, args.epochs + 1):
    train_loss = 0.0
    valid_loss = 0.0
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        if args.cuda:
            data, target = data.cuda(), target.cuda()
        optimizer.zero_grad()
        output = model(data).squeeze()
        loss = criterion(output, target)
        loss.backward()
        optimizer.step()
        train_loss += loss.item() * data.size(0)
    model.eval()
    for batch_idx, (data, target) in enumerate(valid_loader):
        output = model(data).squeeze(1)
        loss = criterion(output, target)
        valid_loss += loss.item() * data.size(0)
    train_loss = train_loss / len(train_loader.sampler)
    valid_loss = valid_loss / len(valid_loader.sampler)
    print('Epoch: {} \tTraining Loss: {:.6f} \tValidation Loss: {:.6f}'.format(epoch, train_loss, valid_loss))
    if valid_loss <= valid_loss_min:
        print('Validation loss decreased ({:.6f} --> {:.6f}).  Saving model ...'.format(valid_loss_min, valid_loss))
        torch.save(model.state_dict(), 'model_aug.pt')
        valid_loss_min = valid_loss
model.load_state_dict(torch.load('model_aug.pt'))
test_loss = 0.0
class_correct = list(0. for i in range(2))
class_total = list(0. for i in range(2))
model.eval()
for data, target in test_loader:
    output = model(data).squeeze(1)
    loss = criterion(output, target)
    test_loss += loss.item() * data.size(0)
    pred = (output > 0).float()
    correct = np.squeeze(pred.eq(target.data.view_as(pred)).cpu().numpy())
    for i in range(len(target)):
        label = int(target.data[i])
        class_correct[label] += correct[i].item()
        class_total[label] += 1
test_loss = test_loss / len(test_loader.dataset)
print('Test Loss: {:.6f}\n'.format(test_loss))
for i in range(2):
    if class_total[i] > 0:
        print('Test Accuracy of %5s: %2d%% (%2d/%2d)' % (i, 100 * class_correct[i] / class_total[i], np.sum(class_correct[i]), np.sum(class_total[i])))
print('\nTest Accuracy (Overall): %2d%% (%2d/%2d)' % (100. * np.sum(class_correct) / np.sum(class_total), np.sum(class_correct), np.sum(class_total)))
