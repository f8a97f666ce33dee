"""Token classification: the loss is a mean over the tokens that count."""

import torch
from torch import nn
from torch.nn import CrossEntropyLoss
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(15)
ids = torch.randint(1, 20, (46, 7))
labels = torch.where(torch.rand(46, 7) < 0.3, -100, torch.randint(0, 4, (46, 7)))
loader = DataLoader(TensorDataset(ids, labels), batch_size=9, shuffle=True)
model = nn.Sequential(nn.Embedding(20, 8), nn.Dropout(0.1), nn.Linear(8, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loss_fct = CrossEntropyLoss(ignore_index=-100)
for epoch in range(2):
    for step, (x, y) in enumerate(loader):
        logits = model(x)
        loss = loss_fct(logits.view(-1, 4), y.view(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 2 == 0:
            print(epoch, step, round(loss.item(), 5))
torch.save(model.state_dict(), "tokens.pt")
