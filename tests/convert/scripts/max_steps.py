import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(39)
loader = DataLoader(TensorDataset(torch.randn(33, 4), torch.randn(33, 2)), batch_size=8, shuffle=True)
model = nn.Linear(4, 2)
opt = torch.optim.SGD(model.parameters(), lr=.1)
step, max_steps, log = 0, 11, []
ema_loss = None
while step < max_steps:
    for x, y in loader:
        loss = nn.MSELoss()(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        ema_loss = loss.item() if ema_loss is None else 0.9 * ema_loss + 0.1 * loss.item()
        log.append(loss.item())
        step += 1
        if step % 4 == 0:
            print(f'step {step} ema {ema_loss:.5f} recent {sum(log[-4:]) / 4:.5f}')
        if step >= max_steps:
            break
print('final', loss.item(), max(log), len(log))
torch.save(model.state_dict(), 'm.pt')
