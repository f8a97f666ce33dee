import torch
import torch.nn as nn

torch.manual_seed(1111)
ntokens, bptt = 12, 5


def batchify(data, bsz):
    nbatch = data.size(0) // bsz
    data = data.narrow(0, 0, nbatch * bsz)
    return data.view(bsz, -1).t().contiguous()


train_data = batchify(torch.randint(0, ntokens, (200,)), 4)


def get_batch(source, i):
    seq_len = min(bptt, len(source) - 1 - i)
    return source[i : i + seq_len], source[i + 1 : i + 1 + seq_len].view(-1)


class RNNModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.rnn, self.decoder = nn.Embedding(ntokens, 8), nn.LSTM(8, 8), nn.Linear(8, ntokens)

    def forward(self, input, hidden):
        output, hidden = self.rnn(self.encoder(input), hidden)
        return self.decoder(output).view(-1, ntokens), hidden


model = RNNModel()
criterion = nn.CrossEntropyLoss()
for epoch in range(2):
    total_loss = 0.0
    hidden = (torch.zeros(1, 4, 8), torch.zeros(1, 4, 8))
    for batch, i in enumerate(range(0, train_data.size(0) - 1, bptt)):
        data, targets = get_batch(train_data, i)
        model.zero_grad()
        hidden = tuple(h.detach() for h in hidden)
        output, hidden = model(data, hidden)
        loss = criterion(output, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-20)
        total_loss += loss.item()
    print(epoch, total_loss / (batch + 1))
