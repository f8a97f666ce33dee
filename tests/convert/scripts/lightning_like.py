import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class DataModule:
    def __init__(self, batch_size=8):
        self.batch_size = batch_size
        g = torch.Generator().manual_seed(3)
        x = torch.randn(76, 5, generator=g)
        self.sets = {"fit": TensorDataset(x[:50], x[:50].sum(1)), "test": TensorDataset(x[50:], x[50:].sum(1))}

    def train_dataloader(self):
        return DataLoader(self.sets["fit"], batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.sets["test"], batch_size=self.batch_size)


class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 10), nn.ReLU(), nn.Linear(10, 1))

    def forward(self, x):
        return self.net(x).squeeze(1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.mse_loss(self(x), y)
        return {"loss": loss, "log": {"train_loss": loss.item()}}

    def validation_step(self, batch, batch_idx):
        x, y = batch
        pred = self(x)
        return {"val_loss": F.mse_loss(pred, y), "abs": (pred - y).abs().sum(), "n": len(y)}

    def validation_epoch_end(self, outputs):
        avg = torch.stack([o["val_loss"] for o in outputs]).mean()
        mae = torch.stack([o["abs"] for o in outputs]).sum() / sum(o["n"] for o in outputs)
        return {"avg_val_loss": avg, "mae": mae}

    def configure_optimizers(self):
        opt = torch.optim.Adam(self.parameters(), lr=0.02)
        return opt, torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)


class Trainer:
    def __init__(self, max_epochs):
        self.max_epochs = max_epochs

    def fit(self, module, dm):
        train, val = dm.train_dataloader(), dm.val_dataloader()
        opt, sched = module.configure_optimizers()
        for epoch in range(self.max_epochs):
            module.train()
            logs = []
            for i, batch in enumerate(train):
                out = module.training_step(batch, i)
                opt.zero_grad()
                out["loss"].backward()
                opt.step()
                logs.append(out["log"]["train_loss"])
            module.eval()
            with torch.no_grad():
                outs = [module.validation_step(b, i) for i, b in enumerate(val)]
            res = module.validation_epoch_end(outs)
            sched.step()
            print(f"epoch {epoch}: train {sum(logs) / len(logs):.4f} val {res['avg_val_loss']:.4f} mae {res['mae']:.4f}")


torch.manual_seed(0)
Trainer(2).fit(Module(), DataModule())
