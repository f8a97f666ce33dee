import argparse
import shutil
import time

import torch
import torch.nn as nn
import torch.nn.parallel
import torch.utils.data as data

best_acc1 = 0


class AverageMeter:
    """Computes and stores the average and current value"""

    def __init__(self, name):
        self.name = name
        self.reset()

    def reset(self):
        self.val = 0
        self.avg = 0
        self.sum = 0
        self.count = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count


def accuracy(output, target, topk=(1,)):
    """Computes the accuracy over the k top predictions for the specified values of k"""
    with torch.no_grad():
        maxk = max(topk)
        batch_size = target.size(0)

        _, pred = output.topk(maxk, 1, True, True)
        pred = pred.t()
        correct = pred.eq(target.view(1, -1).expand_as(pred))

        res = []
        for k in topk:
            correct_k = correct[:k].reshape(-1).float().sum(0, keepdim=True)
            res.append(correct_k.mul_(100.0 / batch_size))
        return res


def train(train_loader, model, criterion, optimizer, epoch, device, args):
    batch_time = AverageMeter("Time")
    losses = AverageMeter("Loss")
    top1 = AverageMeter("Acc@1")
    model.train()
    end = time.time()
    for i, (images, target) in enumerate(train_loader):
        images = images.to(device, non_blocking=True)
        target = target.to(device, non_blocking=True)
        output = model(images)
        loss = criterion(output, target)
        acc1 = (output.argmax(1) == target).float().mean() * 100
        losses.update(loss.item(), images.size(0))
        top1.update(acc1.item(), images.size(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        batch_time.update(time.time() - end)
        end = time.time()
        if i % args.print_freq == 0:
            print(
                f"Epoch: [{epoch}][{i}/{len(train_loader)}] Loss {losses.val:.4f} ({losses.avg:.4f}) "
                f"Acc@1 {top1.val:.2f} ({top1.avg:.2f})"
            )


def validate(val_loader, model, criterion, device, args):
    losses = AverageMeter("Loss")
    top1 = AverageMeter("Acc@1")
    model.eval()
    with torch.no_grad():
        for i, (images, target) in enumerate(val_loader):
            images = images.to(device)
            target = target.to(device)
            output = model(images)
            loss = criterion(output, target)
            losses.update(loss.item(), images.size(0))
            top1.update((output.argmax(1) == target).float().mean().item() * 100, images.size(0))
    print(f" * Loss {losses.avg:.3f} Acc@1 {top1.avg:.3f}")
    return top1.avg


def save_checkpoint(state, is_best, filename="checkpoint.pt"):
    torch.save(state, filename)
    if is_best:
        shutil.copyfile(filename, "model_best.pt")


def main():
    global best_acc1
    parser = argparse.ArgumentParser()
    parser.add_argument("-p", "--print-freq", default=2, type=int)
    parser.add_argument("--epochs", default=2, type=int)
    args = parser.parse_args()
    torch.manual_seed(5)
    if torch.cuda.is_available():
        device = torch.device("cuda")
    else:
        device = torch.device("cpu")
    x, y = torch.randn(64, 6), torch.randint(0, 4, (64,))
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4))
    if torch.cuda.device_count() > 1:
        model = torch.nn.DataParallel(model).cuda()
    model = model.to(device)
    criterion = nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30, gamma=0.1)
    train_loader = data.DataLoader(
        data.TensorDataset(x[:45], y[:45]),
        batch_size=11,
        shuffle=True,
        num_workers=0,
        pin_memory=True,
        sampler=None,
    )
    val_loader = data.DataLoader(
        data.TensorDataset(x[45:], y[45:]), batch_size=6, shuffle=False, pin_memory=True
    )
    for epoch in range(args.epochs):
        train(train_loader, model, criterion, optimizer, epoch, device, args)
        acc1 = validate(val_loader, model, criterion, device, args)
        scheduler.step()
        is_best = acc1 > best_acc1
        best_acc1 = max(acc1, best_acc1)
        save_checkpoint(
            {
                "epoch": epoch + 1,
                "state_dict": model.state_dict(),
                "best_acc1": best_acc1,
                "optimizer": optimizer.state_dict(),
            },
            is_best,
        )


if __name__ == "__main__":
    main()
