"""Several rows for each sample: frames laid end to end, views behind each other, copies in a model, and cut again."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep


class Frames(nn.Module):
    """Frames of a clip in one dimension, with the clips' or with the time in front."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.GroupNorm(4, 8), nn.ReLU(), nn.Dropout(0.3))

    def forward(self, x):
        return F.dropout(self.body(x), 0.2)


class Views(nn.Module):
    """Two copies of the batch, dropped out apart, then each for itself."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 4), nn.Linear(4, 1)
        self.token = nn.Parameter(torch.zeros(1, 4))

    def drop(self, x):
        return F.dropout(x, 0.4)

    def forward(self, x):
        hidden = self.drop(self.inner(torch.cat([x, x.flip(1)])))
        view, other = hidden.chunk(2)
        token = self.drop(self.token.repeat(len(x), 1) + 1)
        return self.outer(self.drop(view) - other * token) + self.drop(hidden[: len(x)]).sum(1, keepdim=True)


torch.set_default_dtype(torch.float64)
torch.manual_seed(11)
world = samestep.init()
clips = torch.randn(38, 4, 6)
train = samestep.loader(TensorDataset(clips, clips.sum((1, 2))), batch_size=15, shuffle=True)
frames = samestep.replicate(Frames().to(world.device), same=True)
views = samestep.replicate(Views().to(world.device), same=True)
optimizer = torch.optim.Adam([*frames.parameters(), *views.parameters()], lr=0.01)
for epoch in range(3):
    for x, y in train:
        optimizer.zero_grad()
        laid = frames(x.view(-1, 6)).view(len(x), 4, 8).mean(1)
        turned = frames(x.transpose(0, 1).reshape(-1, 6)).view(4, len(x), 8).mean(0)
        both = frames(torch.cat([x[:, 0], 2 * x[:, 1]])).view(2, len(x), 8).mean(0)
        loss = F.mse_loss(views(laid + turned + both).squeeze(1), y)
        loss.backward()
        optimizer.step()
        print(epoch, samestep.mean(loss.item()))
samestep.save("weights.pt", {**frames.state_dict(), **views.state_dict()})
