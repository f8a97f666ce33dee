import os
import torch
from torch import nn
from torch.autograd import Variable
from torch.utils.data import DataLoader

if not os.path.exists('./dc_img'):
    os.mkdir('./dc_img')


def to_img(x):
    x = 0.5 * (x + 1)
    x = x.clamp(0, 1)
    x = x.view(x.size(0), 1, 4, 4)
    return x


num_epochs = 2
batch_size = 8
learning_rate = 1e-3
torch.manual_seed(0)
dataset = [(torch.rand(1, 4, 4) * 2 - 1, i % 3) for i in range(50)]
dataloader = DataLoader(dataset, batch_size=batch_size, shuffle=True)


class autoencoder(nn.Module):
    def __init__(self):
        super(autoencoder, self).__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 8), nn.ReLU(True), nn.Linear(8, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 8), nn.ReLU(True), nn.Linear(8, 16), nn.Tanh())

    def forward(self, x):
        x = self.encoder(x)
        x = self.decoder(x)
        return x


model = autoencoder()
criterion = nn.MSELoss()
optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate, weight_decay=1e-5)
for epoch in range(num_epochs):
    total_loss = 0
    for data in dataloader:
        img, _ = data
        img = img.view(img.size(0), -1)
        img = Variable(img)
        output = model(img)
        loss = criterion(output, img)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total_loss += loss.data
    print('epoch [{}/{}], loss:{:.4f} last:{:.4f}'.format(epoch + 1, num_epochs, total_loss, loss.data))
    if epoch % 10 == 0:
        pic = to_img(output.cpu().data)
        torch.save(pic, './dc_img/image_{}.pt'.format(epoch))
torch.save(model.state_dict(), './conv_autoencoder.pth')
