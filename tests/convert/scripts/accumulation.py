import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(18)
accum_iter = 3
model = torch.nn.Sequential(
    torch.nn.Linear(6, 10), torch.nn.Tanh(), torch.nn.Dropout(p=0.2), torch.nn.Linear(10, 1)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data_loader = DataLoader(TensorDataset(torch.randn(47, 6), torch.randn(47, 1)), 6, shuffle=True)
scaler = torch.amp.GradScaler("cuda", enabled=torch.cuda.is_available())
for epoch in range(2):
    print("epoch", epoch, "lr", optimizer.param_groups[0]["lr"])
    for batch_idx, (inputs, labels) in enumerate(data_loader):
        with torch.set_grad_enabled(True):
            with torch.autocast("cuda", enabled=torch.cuda.is_available()):
                preds = model(inputs)
                loss = torch.nn.functional.mse_loss(preds, labels)
                # normalize loss to account for batch accumulation
                loss = loss / accum_iter
            # backward pass
            scaler.scale(loss).backward()
            # weights update
            if ((batch_idx + 1) % accum_iter == 0) or (batch_idx + 1 == len(data_loader)):
                scaler.unscale_(optimizer)
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                print(f"  step {batch_idx}: loss {loss.item() * accum_iter:.5f} norm {norm:.5f}")
torch.save({"model": model.state_dict(), "epoch": epoch}, f="ckpt.pt")
