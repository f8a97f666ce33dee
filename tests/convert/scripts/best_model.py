import copy
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset, random_split

torch.manual_seed(21)
full = TensorDataset(torch.randn(83, 7), torch.randn(83, 1))
train_set, val_set, test_set = random_split(full, [50, 19, 14])
train_loader = DataLoader(train_set, batch_size=12, shuffle=True)
val_loader = DataLoader(val_set, batch_size=8)
test_loader = DataLoader(test_set, batch_size=8)
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
model = nn.Sequential(nn.Linear(7, 16), nn.Tanh(), nn.Linear(16, 1)).to(device)
criterion = nn.MSELoss()
optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
best_model_wts = copy.deepcopy(model.state_dict())
best_val = float("inf")
for epoch in range(4):
    model.train()
    train_loss = 0.0
    for inputs, targets in train_loader:
        inputs, targets = inputs.to(device), targets.to(device)
        optimizer.zero_grad()
        loss = criterion(model(inputs), targets)
        loss.backward()
        optimizer.step()
        train_loss += loss.item() * inputs.size(0)
    train_loss = train_loss / len(train_loader.dataset)
    model.eval()
    val_loss = 0.0
    with torch.no_grad():
        for inputs, targets in val_loader:
            inputs, targets = inputs.to(device), targets.to(device)
            val_loss += criterion(model(inputs), targets).item() * inputs.size(0)
    val_loss = val_loss / len(val_loader.dataset)
    marker = ""
    if val_loss < best_val:
        best_val = val_loss
        best_model_wts = copy.deepcopy(model.state_dict())
        torch.save(model.state_dict(), "best_model.pt")
        marker = " *"
    print(f"Epoch {epoch + 1}: train {train_loss:.5f} val {val_loss:.5f}{marker}")
model.load_state_dict(torch.load("best_model.pt"))
model.eval()
preds, truth = [], []
with torch.no_grad():
    for inputs, targets in test_loader:
        preds.extend(model(inputs.to(device)).squeeze(1).cpu().tolist())
        truth.extend(targets.squeeze(1).tolist())
mae = sum(abs(p - t) for p, t in zip(preds, truth)) / len(preds)
print(f"best val {best_val:.5f} test MAE {mae:.5f} n {len(preds)}")
