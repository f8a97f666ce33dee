import torch, torch.nn as nn
from torch.utils.data import DataLoader, Dataset


class Pairs(Dataset):
    def __init__(self, n):
        g = torch.Generator().manual_seed(5)
        self.a = torch.rand(n, 1, 8, 8, generator=g)
        self.b = 1 - self.a

    def __len__(self):
        return len(self.a)

    def __getitem__(self, i):
        return {'A': self.a[i], 'B': self.b[i]}


class GANLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer('real_label', torch.tensor(1.0))
        self.register_buffer('fake_label', torch.tensor(0.0))
        self.loss = nn.MSELoss()

    def __call__(self, prediction, target_is_real):
        t = self.real_label if target_is_real else self.fake_label
        return self.loss(prediction, t.expand_as(prediction))


class Pix2Pix:
    def __init__(self):
        self.loss_names = ['G_GAN', 'G_L1', 'D_real', 'D_fake']
        self.netG = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.InstanceNorm2d(8), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1))
        self.netD = nn.Sequential(nn.Conv2d(2, 8, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(8, 1, 3, padding=1))
        self.criterionGAN = GANLoss()
        self.criterionL1 = torch.nn.L1Loss()
        self.optimizer_G = torch.optim.Adam(self.netG.parameters(), lr=1e-3, betas=(0.5, 0.999))
        self.optimizer_D = torch.optim.Adam(self.netD.parameters(), lr=1e-3, betas=(0.5, 0.999))

    def set_input(self, input):
        self.real_A, self.real_B = input['A'], input['B']

    def forward(self):
        self.fake_B = self.netG(self.real_A)

    def set_requires_grad(self, nets, flag):
        for p in nets.parameters():
            p.requires_grad = flag

    def backward_D(self):
        fake_AB = torch.cat((self.real_A, self.fake_B), 1)
        self.loss_D_fake = self.criterionGAN(self.netD(fake_AB.detach()), False)
        self.loss_D_real = self.criterionGAN(self.netD(torch.cat((self.real_A, self.real_B), 1)), True)
        self.loss_D = (self.loss_D_fake + self.loss_D_real) * 0.5
        self.loss_D.backward()

    def backward_G(self):
        pred_fake = self.netD(torch.cat((self.real_A, self.fake_B), 1))
        self.loss_G_GAN = self.criterionGAN(pred_fake, True)
        self.loss_G_L1 = self.criterionL1(self.fake_B, self.real_B) * 100
        (self.loss_G_GAN + self.loss_G_L1).backward()

    def optimize_parameters(self):
        self.forward()
        self.set_requires_grad(self.netD, True)
        self.optimizer_D.zero_grad()
        self.backward_D()
        self.optimizer_D.step()
        self.set_requires_grad(self.netD, False)
        self.optimizer_G.zero_grad()
        self.backward_G()
        self.optimizer_G.step()

    def get_current_losses(self):
        return {name: float(getattr(self, 'loss_' + name)) for name in self.loss_names}


torch.manual_seed(0)
dataset = DataLoader(Pairs(22), batch_size=5, shuffle=True)
model = Pix2Pix()
total_iters = 0
for epoch in range(2):
    for data in dataset:
        total_iters += 5
        model.set_input(data)
        model.optimize_parameters()
        if total_iters % 10 == 0:
            losses = model.get_current_losses()
            print('(epoch: %d, iters: %d) ' % (epoch, total_iters) + ' '.join('%s: %.3f' % (k, v) for k, v in losses.items()))
