import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset
from torch.amp import autocast, GradScaler

torch.manual_seed(7)
DEVICE = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
use_amp = DEVICE.type == "cuda"
ACCUM = 2


def build_loaders(bs=4):
    X, Y = torch.randn(48, 6), torch.randint(0, 2, (48,)).float()
    Xv, Yv = torch.randn(22, 6), torch.randint(0, 2, (22,)).float()
    return (
        DataLoader(TensorDataset(X, Y), batch_size=bs, shuffle=True),
        DataLoader(TensorDataset(Xv, Yv), batch_size=bs * 2),
    )


train_loader, val_loader = build_loaders()
model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 1)).to(DEVICE)
opt = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=1e-2, total_steps=2 * len(train_loader) // ACCUM)
scaler = GradScaler(DEVICE.type, enabled=use_amp)
criterion = nn.BCEWithLogitsLoss()

for epoch in range(2):
    model.train()
    opt.zero_grad(set_to_none=True)
    train_loss = 0
    for step, (x, y) in enumerate(train_loader):
        x, y = x.to(DEVICE, non_blocking=True), y.to(DEVICE, non_blocking=True)
        with autocast(device_type=DEVICE.type, enabled=use_amp):
            logits = model(x).squeeze(1)
            loss = criterion(logits, y) / ACCUM
        scaler.scale(loss).backward()
        if (step + 1) % ACCUM == 0 or step + 1 == len(train_loader):
            scaler.unscale_(opt)
            gn = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad(set_to_none=True)
            sched.step()
        train_loss += loss.item() * ACCUM
    model.eval()
    scores, labels = [], []
    with torch.inference_mode():
        for x, y in val_loader:
            p = torch.sigmoid(model(x.to(DEVICE)).squeeze(1))
            scores.extend(p.tolist())
            labels.extend(y.tolist())
    order = sorted(range(len(scores)), key=lambda i: scores[i])
    ranks = {i: r + 1 for r, i in enumerate(order)}
    pos = [i for i, l in enumerate(labels) if l == 1]
    n_pos, n_neg = len(pos), len(labels) - len(pos)
    auc = (sum(ranks[i] for i in pos) - n_pos * (n_pos + 1) / 2) / (n_pos * n_neg)
    print(f"epoch {epoch + 1}: loss {train_loss / len(train_loader):.4f} auc {auc:.4f} grad {gn:.3f}")
