"""Monte Carlo dropout: an evaluation that draws in mid-epoch, with ragged batches and a gathered result."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset, random_split

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(17)
samestep.init()
data = TensorDataset(torch.randn(44, 5), torch.randn(44))
train_set, test_set = random_split(data, [33, 11])
train = samestep.loader(train_set, batch_size=8, shuffle=True)
test = samestep.loader(test_set, batch_size=5)
model = nn.Sequential(
    nn.Linear(5, 16),
    nn.ReLU(),
    nn.Dropout(0.2),
    nn.Linear(16, 16),
    nn.ReLU(),
    nn.Dropout(0.2),
    nn.Linear(16, 1),
)
model = samestep.replicate(model, same=True)
opt = torch.optim.Adam(model.parameters(), 1e-2)
step = 0
for _ in range(3):
    for x, y in train:
        loss = F.mse_loss(model(x).squeeze(1), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        step += 1
        if step % 3 == 0:
            means, stds = [], []
            with torch.no_grad():
                for x, _ in test:
                    draws = torch.stack([model(x).squeeze(1) for _ in range(4)])
                    means.append(draws.mean(0))
                    stds.append(draws.std(0))
            empty = torch.empty(0)
            means, stds = (
                samestep.gather(torch.cat([empty, *means])),
                samestep.gather(torch.cat([empty, *stds])),
            )
            print("test", [round(float(m), 9) for m in means], stds.median().item())
        print(samestep.mean(loss.item(), weight=len(y)))
samestep.save("weights.pt", model.state_dict())
