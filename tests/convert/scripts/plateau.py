import torch
import torch.nn as nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset, random_split


def accuracy_of(logits, y):
    return (logits.argmax(dim=-1) == y).float().mean()


def evaluate(model, loader, criterion, device):
    model.eval()
    losses = []
    accs = []
    with torch.inference_mode():
        for xb, yb in loader:
            xb, yb = xb.to(device), yb.to(device)
            out = model(xb)
            losses.append(criterion(out, yb).item())
            accs.append(accuracy_of(out, yb).item())
    return sum(losses) / len(losses), sum(accs) / len(accs)


def fit(cfg):
    torch.manual_seed(cfg["seed"])
    device = cfg["device"]
    data = TensorDataset(torch.randn(70, 6), torch.randint(0, 3, (70,)))
    train_ds, val_ds = random_split(data, [50, 20])
    train_dl = DataLoader(train_ds, batch_size=cfg["bs"], shuffle=True)
    val_dl = DataLoader(val_ds, batch_size=cfg["bs"])
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)).to(device)
    opt = torch.optim.SGD(model.parameters(), lr=0.5)
    sched = ReduceLROnPlateau(opt, mode="min", factor=0.5, patience=0)
    criterion = nn.CrossEntropyLoss()
    best, history = float("inf"), {"train": [], "val": []}
    for epoch in range(cfg["epochs"]):
        model.train()
        epoch_loss, seen = 0.0, 0
        for xb, yb in train_dl:
            xb, yb = xb.to(device), yb.to(device)
            opt.zero_grad()
            loss = criterion(model(xb), yb)
            loss.backward()
            opt.step()
            epoch_loss += loss.item() * xb.size(0)
            seen += xb.size(0)
        epoch_loss /= seen
        val_loss, val_acc = evaluate(model, val_dl, criterion, device)
        sched.step(val_loss)
        history["train"].append(epoch_loss)
        history["val"].append(val_loss)
        if val_loss < best:
            best = val_loss
            torch.save(model.state_dict(), "best.pt")
        print(f"{epoch=} {epoch_loss=:.5f} {val_loss=:.5f} acc={val_acc:.4f} lr={opt.param_groups[0]['lr']}")
    print("best", min(history["val"]), best)


if __name__ == "__main__":
    fit({"seed": 20, "bs": 8, "epochs": 4, "device": "cuda" if torch.cuda.is_available() else "cpu"})
