import torch, math
from dataclasses import dataclass
from torch import nn
from torch.utils.data import TensorDataset, DataLoader, random_split

@dataclass
class Config:
    lr: float = 3e-2
    batch_size: int = 9
    epochs: int = 3
    seed: int = 31

def run_epoch(model, loader, criterion, optimizer=None):
    is_train = optimizer is not None
    model.train(is_train)
    total_loss, total_correct, n = 0.0, 0, 0
    with torch.set_grad_enabled(is_train):
        for x, y in loader:
            logits = model(x)
            loss = criterion(logits, y)
            if is_train:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            bs = y.shape[0]
            total_loss += loss.item() * bs
            total_correct += (logits.argmax(-1) == y).sum().item()
            n += bs
    return {"loss": total_loss / n, "acc": total_correct / n}

def main(cfg: Config):
    torch.manual_seed(cfg.seed)
    ds = TensorDataset(torch.randn(77, 4), torch.randint(0, 3, (77,)))
    tr, va = random_split(ds, [56, 21])
    tr_loader = DataLoader(tr, cfg.batch_size, shuffle=True)
    va_loader = DataLoader(va, cfg.batch_size)
    model = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 3))
    opt = torch.optim.AdamW(model.parameters(), lr=cfg.lr)
    crit = nn.CrossEntropyLoss(label_smoothing=0.1)
    best, patience = math.inf, 2
    for ep in range(cfg.epochs):
        tr_m = run_epoch(model, tr_loader, crit, opt)
        va_m = run_epoch(model, va_loader, crit)
        print(f"[{ep}] " + " ".join(f"train_{k}={v:.4f}" for k, v in tr_m.items()) + " " + " ".join(f"val_{k}={v:.4f}" for k, v in va_m.items()))
        if va_m["loss"] < best:
            best = va_m["loss"]
            torch.save({"cfg": cfg.lr, "model": model.state_dict(), "val": va_m}, "best.pt")
        else:
            patience -= 1
            if patience == 0:
                break
    print("best: %.5f" % best)

if __name__ == "__main__":
    main(Config())
