from collections import defaultdict
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Toy(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.x = torch.randn(n, 5, generator=g)
        self.y = (self.x.sum(1) > 0).float()

    def __len__(self):
        return self.x.shape[0]

    def __getitem__(self, idx):
        return {'x': self.x[idx], 'y': self.y[idx], 'idx': idx}


def evaluate(model, loader, loss_fn):
    model.eval()
    metrics = defaultdict(float)
    with torch.no_grad():
        for batch in loader:
            logits = model(batch['x']).squeeze(1)
            metrics['loss'] += loss_fn(logits, batch['y']).item() * len(batch['y'])
            metrics['correct'] += ((logits > 0) == batch['y'].bool()).sum().item()
            metrics['n'] += len(batch['y'])
    return metrics['loss'] / metrics['n'], metrics['correct'] / metrics['n']


torch.manual_seed(33)
train_loader = DataLoader(Toy(45, 1), batch_size=8, shuffle=True)
test_loader = DataLoader(Toy(21, 2), batch_size=8, shuffle=False)
model = nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 1))
loss_fn = nn.BCEWithLogitsLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=.2)
for epoch in range(3):
    model.train()
    stats = {'loss': 0., 'batches': 0}
    for batch in train_loader:
        optimizer.zero_grad()
        out = model(batch['x']).squeeze(1)
        loss = loss_fn(out, batch['y'])
        loss.backward()
        optimizer.step()
        stats['loss'] += loss.item()
        stats['batches'] += 1
    loss, acc = evaluate(model, test_loader, loss_fn)
    print('epoch {:d} train {:.4f} test {:.4f} acc {:.3f}'.format(epoch, stats['loss'] / stats['batches'], loss, acc))
torch.save(model.state_dict(), 'toy.pth')
