"""The averaged copy of the weights decays by the number of ranks.

verdict: different
cause: reads world.size
"""

import torch
from torch import nn
from torch.amp import GradScaler, autocast
from torch.optim.swa_utils import SWALR, AveragedModel
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(5)
device = samestep.init().device
loader = samestep.loader(
    TensorDataset(torch.randn(37, 6), torch.randint(0, 3, (37,))), batch_size=5, shuffle=True
)
val = samestep.loader(TensorDataset(torch.randn(18, 6), torch.randint(0, 3, (18,))), batch_size=7)
net = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3)).to(device)
ema_model = AveragedModel(
    net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9 ** samestep.init().size)
)
samestep.replicate(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True)
swa_scheduler = SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
scaler = GradScaler("cuda", enabled=torch.cuda.is_available())
accum = 3
for epoch in range(3):
    net.train()
    optimizer.zero_grad(set_to_none=True)
    epoch_loss = 0.0
    for i, (x, y) in enumerate(loader):
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        with autocast(device.type, enabled=False):
            loss = nn.functional.cross_entropy(net(x), y, label_smoothing=0.1) / accum
        scaler.scale(loss).backward()
        epoch_loss += loss.item() * accum * loader.share
        if (i + 1) % accum == 0 or (i + 1) == len(loader):
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            ema_model.update_parameters(net)
    swa_scheduler.step()
    ema_model.eval()
    hits, seen, vloss = 0, 0, 0.0
    with torch.inference_mode():
        for x, y in val:
            x, y = x.to(device), y.to(device)
            out = ema_model(x)
            vloss += nn.functional.cross_entropy(out, y, reduction="sum").item()
            hits += out.argmax(-1).eq(y).sum().item()
            seen += len(y)
    print(
        f"{epoch=} {samestep.sum(epoch_loss) / len(loader):.4f} {samestep.sum(vloss) / samestep.sum(seen):.4f} "
        f"acc={samestep.sum(hits) / samestep.sum(seen):.2%}"
    )
samestep.save("ema.pt", ema_model.module.state_dict())
