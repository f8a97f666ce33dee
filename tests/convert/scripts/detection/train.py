#!/usr/bin/env python
import argparse
import torch
from torch.utils.data import DataLoader
from lib.data import make_dataset
from lib.engine import train_one_epoch, evaluate
from lib import models


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--bs", type=int, default=8)
    p.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    return p.parse_args()


def main():
    args = get_args()
    torch.manual_seed(42)
    train_set, val_set = make_dataset()
    kw = dict(batch_size=args.bs, num_workers=0)
    train_loader = DataLoader(train_set, shuffle=True, **kw)
    val_loader = DataLoader(val_set, shuffle=False, **kw)
    model = models.build(4).to(args.device)
    params = [
        {"params": model.backbone.parameters(), "lr": 1e-2},
        {"params": model.head.parameters(), "lr": 5e-2},
    ]
    optimizer = torch.optim.SGD(params, lr=1e-2, momentum=0.9)
    for epoch in range(args.epochs):
        train_one_epoch(model, optimizer, train_loader, args.device, epoch)
        stats = evaluate(model, val_loader, args.device)
        print(f"val: {stats}")
    torch.save(model.state_dict(), "final.pt")


if __name__ == "__main__":
    main()
