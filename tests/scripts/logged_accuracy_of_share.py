"""Logs with time stamps and durations without units; the accuracy is of one rank.

verdict: printed
printed: logged_accuracy_of_share.py
"""

import logging
import sys
import time
from datetime import datetime

import torch
from torch import nn
from torch.utils.data import TensorDataset

import samestep

logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
log = logging.getLogger("train")


def run():
    torch.manual_seed(0)
    world = samestep.init()
    x = torch.randn(80, 6)
    data = TensorDataset(x, (x[:, 0] > 0).long())
    loader, test = samestep.loader(data, 10, shuffle=True), samestep.loader(data, 20)
    model = samestep.replicate(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    log.info("using %d processes", world.size)
    for epoch in range(2):
        start = time.time()
        for xb, yb in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(xb), yb).backward()
            optimizer.step()
        correct = 0
        with torch.no_grad():
            for xb, yb in test:
                correct += (model(xb).argmax(1) == yb).sum().item()
        log.info("epoch %d acc %.4f took %.2f", epoch, correct / 80, time.time() - start)
        print(f"[{datetime.now()}] epoch {epoch} throughput {80 / (time.time() - start):.1f}")


run()
