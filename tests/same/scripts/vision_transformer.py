"""A vision transformer with fused attention, a class token, masked patches and a batch of as many samples as ranks."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(31)
world = samestep.init()
train = samestep.loader(
    TensorDataset(torch.randn(23, 1, 6, 6), torch.randint(0, 3, (23,))), batch_size=5, shuffle=True
)
# the optimizer is made before the model is replicated


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(b, t, 3, 2, 4).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2 if self.training else 0.0)
        return x + F.dropout(self.out(y.transpose(1, 2).reshape(b, t, c)), 0.1, self.training)


class ViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch, self.token = nn.Conv2d(1, 8, 2, 2), nn.Parameter(torch.zeros(1, 1, 8))
        self.place = nn.Parameter(torch.randn(1, 10, 8) * 0.1)
        self.layers, self.head = nn.Sequential(Layer(), Layer()), nn.Linear(8, 3)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.place
        if self.training:
            order = torch.rand(len(x), 9).argsort(1)[:, :5] + 1
            order = torch.cat([torch.zeros(len(x), 1, dtype=torch.int64), order], 1)
            x = x.gather(1, order.unsqueeze(2).expand(-1, -1, 8))
        return self.head(self.layers(F.dropout(x, 0.1, self.training))[:, 0])


net = ViT().to(world.device)
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
model = samestep.replicate(net, same=True)
for epoch in range(3):
    for x, y in train:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        print(epoch, samestep.mean(loss.item()))
samestep.save("weights.pt", model.state_dict())
