"""A ConvNeXt as timm writes it: stochastic depth by new_empty().bernoulli_(), channels moved to the end."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(12)
samestep.init()
train = samestep.loader(
    TensorDataset(torch.rand(35, 3, 8, 8), torch.randint(0, 4, (35,))), batch_size=8, shuffle=True
)


def drop_path(x, drop_prob, training):
    if drop_prob == 0.0 or not training:
        return x
    keep = 1 - drop_prob
    return x * x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(keep).div_(keep)


class Block(nn.Module):
    def __init__(self, dim, rate):
        super().__init__()
        self.dw, self.norm, self.rate = nn.Conv2d(dim, dim, 3, padding=1, groups=dim), nn.LayerNorm(dim), rate
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * dim, dim))
        self.gamma = nn.Parameter(0.1 * torch.ones(dim))

    def forward(self, x):
        y = self.gamma * self.mlp(self.norm(self.dw(x).permute(0, 2, 3, 1)))
        return x + drop_path(y.permute(0, 3, 1, 2), self.rate, self.training)


class ConvNeXt(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 2, 2)
        self.blocks = nn.Sequential(*(Block(6, rate) for rate in (0.0, 0.2, 0.4)))
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 4)
        for m in self.modules():
            if isinstance(m, nn.Linear | nn.Conv2d):
                nn.init.trunc_normal_(m.weight, std=0.2)

    def forward(self, x):
        return self.head(self.norm(self.blocks(self.stem(x)).mean([-2, -1])))


model = samestep.replicate(ConvNeXt(), same=True)
opt = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.05)
for _ in range(3):
    for x, y in train:
        loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(samestep.mean(loss.item()))
samestep.save("weights.pt", model.state_dict())
