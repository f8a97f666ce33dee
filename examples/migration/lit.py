"""Training with Lightning's Trainer; start it with `torchrun --nproc-per-node 2 lit.py`."""

import lightning
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from task import Net, test_set, train_set


class Digits(lightning.LightningModule):
    """The network, its loss and its optimizer."""

    def __init__(self):
        super().__init__()
        self.net = Net()

    def training_step(self, batch):
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def validation_step(self, batch):
        x, y = batch
        right = (self.net(x).argmax(1) == y).float().mean()
        self.log("accuracy", right, on_epoch=True, sync_dist=True)

    def on_validation_epoch_end(self):
        epoch, accuracy = self.current_epoch, self.trainer.callback_metrics["accuracy"]
        if not self.trainer.sanity_checking:
            self.trainer.print(f"epoch {epoch}: {accuracy.item():.2%}")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


trainer = lightning.Trainer(max_epochs=3, devices=2, strategy="ddp", logger=False)
torch.manual_seed(0)
model = Digits()
train = DataLoader(train_set, batch_size=64 // trainer.world_size, shuffle=True, drop_last=True)
test = DataLoader(test_set, batch_size=60)
trainer.fit(model, train, test)
if trainer.is_global_zero:
    torch.save(model.net.state_dict(), "model.pt")
