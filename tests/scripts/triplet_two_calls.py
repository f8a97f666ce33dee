"""An encoder called three times on anchors, positives and negatives of the batch.

verdict: same
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(0)
samestep.init()
triples = TensorDataset(torch.randn(36, 5), torch.randn(36, 5), torch.randn(36, 5))
loader = samestep.loader(triples, 9, shuffle=True)
encoder = samestep.replicate(nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4)))
optimizer = torch.optim.SGD(encoder.parameters(), lr=0.1)
for _ in range(2):
    for anchor, positive, negative in loader:
        loss = F.triplet_margin_loss(encoder(anchor), encoder(positive), encoder(negative), margin=2.0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
