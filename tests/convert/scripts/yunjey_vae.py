import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

# Device configuration
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
image_size, h_dim, z_dim, num_epochs, batch_size, learning_rate = 20, 12, 3, 2, 8, 1e-3
torch.manual_seed(9)
data_loader = DataLoader(TensorDataset(torch.rand(45, 20), torch.zeros(45)), batch_size, True)


# VAE model
class VAE(nn.Module):
    def __init__(self, image_size=20, h_dim=12, z_dim=3):
        super().__init__()
        self.fc1 = nn.Linear(image_size, h_dim)
        self.fc2 = nn.Linear(h_dim, z_dim)
        self.fc3 = nn.Linear(h_dim, z_dim)
        self.fc4 = nn.Linear(z_dim, h_dim)
        self.fc5 = nn.Linear(h_dim, image_size)

    def forward(self, x):
        h = F.relu(self.fc1(x))
        mu, log_var = self.fc2(h), self.fc3(h)
        std = torch.exp(log_var / 2)
        z = mu + torch.randn_like(std) * std
        return F.sigmoid(self.fc5(F.relu(self.fc4(z)))), mu, log_var


model = VAE().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)

# Start training
for epoch in range(num_epochs):
    for i, (x, _) in enumerate(data_loader):
        # Forward pass
        x = x.to(device).view(-1, image_size)
        x_reconst, mu, log_var = model(x)

        reconst_loss = F.binary_cross_entropy(x_reconst, x, size_average=False)
        kl_div = -0.5 * torch.sum(1 + log_var - mu.pow(2) - log_var.exp())

        # Backprop and optimize
        loss = reconst_loss + kl_div
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        if (i + 1) % 2 == 0:
            print(
                f"Epoch[{epoch + 1}/{num_epochs}], Step [{i + 1}/{len(data_loader)}], Reconst Loss: {reconst_loss.item():.4f}, KL Div: {kl_div.item():.4f}"
            )
torch.save(model, "vae_model.pt") if False else torch.save(model.state_dict(), "vae.pt")
