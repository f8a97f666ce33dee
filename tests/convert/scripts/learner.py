import torch, argparse, json, time
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Learner:
    def __init__(self, net, dls, lr):
        self.net, self.dls = net, dls
        self.opt = torch.optim.SGD(self.net.parameters(), lr)
        self.loss_fn = nn.CrossEntropyLoss(reduction="none")
    def one_epoch(self, train):
        dl = self.dls["train" if train else "valid"]
        self.net.train(train)
        tot, cnt, hits = 0., 0, 0
        t0 = time.time()
        for xb, yb in dl:
            with torch.set_grad_enabled(train):
                preds = self.net(xb)
                l = self.loss_fn(preds, yb)
            if train:
                l.mean().backward()
                self.opt.step()
                self.opt.zero_grad()
            tot += l.sum().item()
            hits += (preds.argmax(-1) == yb).sum().item()
            cnt += len(xb)
        print(f"{'train' if train else 'valid'}: {tot / cnt:.5f} {hits}/{cnt}")
        return tot / cnt
    def fit(self, n):
        hist = []
        for e in range(n):
            hist.append((self.one_epoch(True), self.one_epoch(False)))
            top = min(h[1] for h in hist)
            if hist[-1][1] <= top:
                torch.save(self.net.state_dict(), f"net_{e}.pt")
        return hist

torch.manual_seed(3)
dls = {"train": DataLoader(TensorDataset(torch.randn(45, 5), torch.randint(0, 3, (45,))), 8, True),
       "valid": DataLoader(TensorDataset(torch.randn(25, 5), torch.randint(0, 3, (25,))), 8)}
h = Learner(nn.Linear(5, 3), dls, .1).fit(2)
print(json.dumps(h))
with open("hist.json", "w") as f:
    json.dump(h, f)
