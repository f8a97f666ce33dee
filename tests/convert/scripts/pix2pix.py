import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

def main():
    torch.manual_seed(7)
    loader = DataLoader(TensorDataset(torch.randn(50, 6), torch.randn(50, 3)), batch_size=10, shuffle=True)
    G, D = nn.Linear(6, 3), nn.Sequential(nn.Linear(3, 8), nn.LeakyReLU(), nn.Linear(8, 1))
    opts = {"G": torch.optim.Adam(G.parameters(), 1e-3), "D": torch.optim.Adam(D.parameters(), 1e-3)}
    bce = nn.BCEWithLogitsLoss()
    hist = {"G": [], "D": []}
    for epoch in range(2):
        for x, real in loader:
            ones, zeros = torch.ones(x.size(0), 1), torch.zeros(x.size(0), 1)
            d_loss = 0.5 * (bce(D(real), ones) + bce(D(G(x).detach()), zeros))
            opts["D"].zero_grad(); d_loss.backward(); opts["D"].step()
            g_adv = bce(D(G(x)), ones)
            g_l1 = nn.L1Loss()(G(x), real)
            g_loss = g_adv + 10 * g_l1
            opts["G"].zero_grad(); g_loss.backward(); opts["G"].step()
            hist["G"].append(g_loss.item()); hist["D"].append(d_loss.item())
        print(epoch, sum(hist["G"][-5:]) / 5, sum(hist["D"][-5:]) / 5)
        torch.save({"G": G.state_dict(), "D": D.state_dict(), "hist": hist}, f"gan_{epoch}.pt")

if __name__ == "__main__":
    main()
