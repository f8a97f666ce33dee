"""Texts sorted by length and padded by collate_fn to the longest of the batch: dropout, BatchNorm, a mean over time."""

import torch
from torch import nn

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(3)
world = samestep.init()
texts = [(torch.randint(1, 9, (int(length),)), int(length) % 3) for length in torch.randint(2, 9, (21,))]


def padded(samples):
    samples.sort(key=lambda sample: len(sample[0]), reverse=True)
    words = nn.utils.rnn.pad_sequence([text for text, _ in samples], batch_first=True)
    lengths = [len(text) for text, _ in samples]
    return {"words": words, "labels": torch.tensor([label for _, label in samples]), "lengths": lengths}


train = samestep.loader(texts, batch_size=8, shuffle=True, collate_fn=padded)
test = samestep.loader(texts[:10], batch_size=6, collate_fn=padded)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(9, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)
        self.attention = nn.MultiheadAttention(6, 2, dropout=0.2, bias=False, batch_first=True)
        self.drop = nn.Dropout(0.3)

    def forward(self, words):
        x = self.drop(self.embed(words))
        x = x + self.attention(x, x, x, key_padding_mask=words == 0)[0]
        x = self.norm(x.flatten(0, 1)).view(x.shape)
        return self.head((x + 0.1 * torch.randn_like(x)).mean(1))


model = samestep.replicate(Net().to(world.device), same=True)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(3):
    model.train()
    for batch in train:
        assert batch["lengths"] == sorted(batch["lengths"], reverse=True)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch["words"]), batch["labels"])
        loss.backward()
        optimizer.step()
        print("loss", samestep.mean(loss.item()))
    model.eval()
    right = 0
    with torch.no_grad():
        for batch in test:
            right += (model(batch["words"]).argmax(1) == batch["labels"]).sum().item()
    print(epoch, samestep.sum(right))
samestep.save("weights.pt", model.state_dict())
