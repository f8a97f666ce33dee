import torch
from .meters import SmoothedValue


def train_one_epoch(model, optimizer, data_loader, device, epoch, print_freq=3):
    model.train()
    meter = SmoothedValue()
    for i, (images, targets) in enumerate(data_loader):
        images, targets = images.to(device), targets.to(device)
        loss_dict = model(images, targets)
        losses = sum(loss for loss in loss_dict.values())
        optimizer.zero_grad()
        losses.backward()
        optimizer.step()
        meter.update(losses.item())
        if i % print_freq == 0:
            print(f"Epoch: [{epoch}] [{i}/{len(data_loader)}] loss: {losses.item():.4f} l1: {loss_dict['loss_l1'].item():.4f}")
    print(f"mean loss {meter.global_avg:.4f}")


@torch.inference_mode()
def evaluate(model, data_loader, device):
    model.eval()
    err, n = 0.0, 0
    for images, targets in data_loader:
        out = model(images.to(device))
        err += (out - targets.to(device)).abs().mean(dim=1).sum().item()
        n += images.size(0)
    return {"mae": round(err / n, 5), "n": n}
