"""CLIP with a temperature inside the model and gathered features.

verdict: same
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(6, 4), nn.Linear(5, 4)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, image, text):
        return (
            F.normalize(self.image(image), dim=1),
            F.normalize(self.text(text), dim=1),
            self.scale.exp() * 1.0,
        )


torch.manual_seed(0)
samestep.init()
loader = samestep.loader(TensorDataset(torch.randn(32, 6), torch.randn(32, 5)), 8, shuffle=True)
model = samestep.replicate(Towers())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for image, text in loader:
    a, b, scale = model(image, text)
    a, b = samestep.gather(a), samestep.gather(b)
    logits = scale * a @ b.T
    labels = torch.arange(len(logits))
    loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
