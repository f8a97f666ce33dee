import random
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler


class Seqs(Dataset):
    def __init__(self):
        rng = random.Random(0)
        self.rows = [torch.tensor([rng.randint(1, 9) for _ in range(rng.randint(2, 9))]) for _ in range(50)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i], self.rows[i].sum() % 3


class Buckets(Sampler):
    def __init__(self, lengths, size):
        self.lengths, self.size = lengths, size

    def __len__(self):
        return (len(self.lengths) + self.size - 1) // self.size

    def __iter__(self):
        order = sorted(range(len(self.lengths)), key=lambda i: self.lengths[i])
        batches = [order[i:i + self.size] for i in range(0, len(order), self.size)]
        random.shuffle(batches)
        yield from batches


class Lines(IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        for r in self.rows:
            yield r, r.sum() % 3


def collate(b):
    xs, ys = zip(*b)
    return pad_sequence(xs, batch_first=True), torch.stack(ys)


random.seed(0)
torch.manual_seed(0)
ds = Seqs()
train = DataLoader(ds, batch_sampler=Buckets([len(r) for r in ds.rows], 8), collate_fn=collate)
stream = DataLoader(Lines(ds.rows[:26]), batch_size=8, collate_fn=collate)
net = nn.Sequential(nn.EmbeddingBag(10, 8, padding_idx=0), nn.Linear(8, 3))
opt = torch.optim.Adam(net.parameters(), 0.02)
for epoch in range(2):
    total = seen = 0
    for loader in (train, stream):
        for x, y in loader:
            loss = F.cross_entropy(net(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.item() * len(y)
            seen += len(y)
    print(epoch, "%.5f" % (total / seen), seen)
right = n = 0
with torch.no_grad():
    for x, y in stream:
        right += (net(x).argmax(1) == y).sum().item()
        n += len(y)
print(right, n)
