import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(37)
X = torch.randn(90, 4)
Y = X @ torch.tensor([1., -2., .5, 0.]) + 0.3 * torch.randn(90)
train_loader = DataLoader(TensorDataset(X[:60], Y[:60]), batch_size=16, shuffle=True)
test_loader = DataLoader(TensorDataset(X[60:], Y[60:]), batch_size=16)
model = nn.Linear(4, 1)
criterion = nn.MSELoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

for epoch in range(3):
    model.train()
    for batch_x, batch_y in train_loader:
        prediction = model(batch_x)[:, 0]
        loss = criterion(prediction, batch_y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print('epoch [{}/3], loss:{:.4f}'.format(epoch + 1, loss.data))

model.eval()
ss_res, ss_tot, abs_err, count = 0.0, 0.0, 0.0, 0
y_mean = Y[60:].mean()
with torch.no_grad():
    for batch_x, batch_y in test_loader:
        prediction = model(batch_x).view(-1)
        ss_res += ((batch_y - prediction) ** 2).sum().item()
        ss_tot += ((batch_y - y_mean) ** 2).sum().item()
        abs_err += torch.abs(batch_y - prediction).sum().item()
        count += batch_y.numel()
r2 = 1 - ss_res / ss_tot
rmse = (ss_res / count) ** 0.5
print('R2 %.5f RMSE %.5f MAE %.5f' % (r2, rmse, abs_err / count))
torch.save(model.state_dict(), 'linear.pt')
