import torch
import torch.nn as nn
from itertools import chain
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(35)
cell, head = nn.LSTMCell(3, 6), nn.Linear(6, 3)
opt = torch.optim.RMSprop(chain(cell.parameters(), head.parameters()), lr=0.01)
dl = DataLoader(TensorDataset(torch.randn(41, 7, 3)), batch_size=8, shuffle=True)
for epoch in range(2):
    epoch_loss = 0
    for k, (seq,) in enumerate(dl):
        h = torch.zeros(seq.size(0), 6)
        c = torch.zeros(seq.size(0), 6)
        loss = 0
        for t in range(seq.size(1) - 1):
            h, c = cell(seq[:, t], (h, c))
            loss += nn.functional.mse_loss(head(h), seq[:, t + 1])
        opt.zero_grad()
        loss.backward()
        opt.step()
        epoch_loss += loss.item() / (seq.size(1) - 1)
        if k % 2 == 0:
            print('\t', k, loss.item())
    print('epoch', epoch, epoch_loss / len(dl))
torch.save(cell.state_dict(), 'cell.pt')
