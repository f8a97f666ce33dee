from math import log10

import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(123)
print("===> Loading datasets")
lr, hr = torch.rand(40, 1, 4, 4), torch.rand(40, 1, 8, 8)
training_data_loader = DataLoader(
    dataset=TensorDataset(lr[:29], hr[:29]), num_workers=0, batch_size=6, shuffle=True
)
testing_data_loader = DataLoader(
    dataset=TensorDataset(lr[29:], hr[29:]), num_workers=0, batch_size=4, shuffle=False
)

print("===> Building model")
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = nn.Sequential(nn.Conv2d(1, 8, 3, 1, 1), nn.Tanh(), nn.Conv2d(8, 4, 3, 1, 1), nn.PixelShuffle(2)).to(
    device
)
criterion = nn.MSELoss()

optimizer = optim.Adam(model.parameters(), lr=0.01)


def train(epoch):
    epoch_loss = 0
    for iteration, batch in enumerate(training_data_loader, 1):
        input, target = batch[0].to(device), batch[1].to(device)

        optimizer.zero_grad()
        loss = criterion(model(input), target)
        epoch_loss += loss.item()
        loss.backward()
        optimizer.step()

        print(
            f"===> Epoch[{epoch}]({iteration}/{len(training_data_loader)}): Loss: {loss.item():.4f}"
        )

    print(f"===> Epoch {epoch} Complete: Avg. Loss: {epoch_loss / len(training_data_loader):.4f}")


def test():
    avg_mse = 0
    with torch.no_grad():
        for batch in testing_data_loader:
            input, target = batch[0].to(device), batch[1].to(device)

            prediction = model(input)
            mse = criterion(prediction, target)
            avg_mse += mse.item()
    print(f"===> Avg. PSNR: {10 * log10(1 / (avg_mse / len(testing_data_loader))):.4f} dB")


def checkpoint(epoch):
    model_out_path = f"model_epoch_{epoch}.pt"
    torch.save(model.state_dict(), model_out_path)
    print(f"Checkpoint saved to {model_out_path}")


for epoch in range(1, 2 + 1):
    train(epoch)
    test()
    checkpoint(epoch)
