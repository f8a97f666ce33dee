import torch
import torch.utils.data
from torch import nn, optim
from torch.nn import functional as F
torch.manual_seed(1)
device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
images = torch.rand(52, 1, 5, 4)
kwargs = {'num_workers': 0}
train_loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images[:37], torch.zeros(37)), batch_size=8, shuffle=True, **kwargs)
test_loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images[37:], torch.zeros(15)), batch_size=7, shuffle=False, **kwargs)

class VAE(nn.Module):

    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(20, 12)
        self.fc21 = nn.Linear(12, 4)
        self.fc22 = nn.Linear(12, 4)
        self.fc3 = nn.Linear(4, 12)
        self.fc4 = nn.Linear(12, 20)

    def encode(self, x):
        h1 = F.relu(self.fc1(x))
        return (self.fc21(h1), self.fc22(h1))

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        eps = torch.randn_like(std)
        return mu + eps * std

    def decode(self, z):
        h3 = F.relu(self.fc3(z))
        return torch.sigmoid(self.fc4(h3))

    def forward(self, x):
        mu, logvar = self.encode(x.view(-1, 20))
        z = self.reparameterize(mu, logvar)
        return (self.decode(z), mu, logvar)
model = VAE().to(device)
optimizer = optim.Adam(model.parameters(), lr=0.001)

def loss_function(recon_x, x, mu, logvar):
    BCE = F.binary_cross_entropy(recon_x, x.view(-1, 20), reduction='sum')
    KLD = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return BCE + KLD

def train(epoch):
    model.train()
    train_loss = 0
    for batch_idx, (data, _) in enumerate(train_loader):
        if True:
            data = data.to(device)
            optimizer.zero_grad()
            recon_batch, mu, logvar = model(data)
            loss = loss_function(recon_batch, data, mu, logvar)
            loss.backward()
            train_loss += loss.item()
            optimizer.step()
            if batch_idx % 2 == 0:
                print(f'Train Epoch: {epoch} [{batch_idx * len(data)}/{len(train_loader.dataset)} ({100.0 * batch_idx / len(train_loader):.0f}%)]\tLoss: {loss.item() / len(data):.6f}')
    print(f'====> Epoch: {epoch} Average loss: {train_loss / len(train_loader.dataset):.4f}')

def test(epoch):
    model.eval()
    test_loss = 0
    with torch.no_grad():
        for i, (data, _) in enumerate(test_loader):
            if True:
                data = data.to(device)
                recon_batch, mu, logvar = model(data)
                test_loss += loss_function(recon_batch, data, mu, logvar).item()
    test_loss /= len(test_loader.dataset)
    print(f'====> Test set loss: {test_loss:.4f}')
if __name__ == '__main__':
    for epoch in range(1, 3):
        if True:
            train(epoch)
            test(epoch)
            with torch.no_grad():
                sample = torch.randn(5, 4).to(device)
                sample = model.decode(sample).cpu()
                print(sample.sum().item())
    torch.save(model.state_dict(), 'vae.pt')