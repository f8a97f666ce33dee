"""Dropout inside fused attention and cuDNN's recurrent networks with same=True: one process's numbers at 2 and 3."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import samestep

HEADS, WIDTH, LENGTH = 4, 32, 7
ROUNDING = {"bfloat16": 1e-3}


class Attention(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.into = nn.Linear(WIDTH, 3 * WIDTH)
        self.bias = nn.Parameter(torch.zeros(HEADS, LENGTH, LENGTH))
        self.out = nn.Linear(WIDTH, 3)

    def attend(self, x, lengths):
        q, k, v = self.into(x).view(len(x), LENGTH, 3, HEADS, -1).transpose(1, 3).unbind(2)
        mask = None
        if self.kind == "masked":
            mask = (torch.arange(LENGTH, device=x.device) < lengths[:, None])[:, None, None]
        if self.kind == "biased":
            mask = self.bias
        if self.kind == "biased by sample":
            mask = self.bias + x.mean(-1)[:, None, None]
        if self.kind == "two windows":
            q, k, v = (part.reshape(len(x) * 2, HEADS // 2, LENGTH, -1) for part in (q, k, v))
        if self.kind == "bfloat16":
            q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
        mixed = F.scaled_dot_product_attention(
            q, k, v, mask, dropout_p=0.3 * self.training, is_causal=self.kind == "causal"
        )
        return mixed.float().reshape(len(x), LENGTH, WIDTH).mean(1)

    def forward(self, x, lengths):
        if self.kind == "checkpointed":
            return self.out(checkpoint(self.attend, x, lengths, use_reentrant=False))
        return self.out(self.attend(x, lengths))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, HEADS, 64, 0.2), 2)
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, x, lengths):
        return self.out(self.encoder(x.transpose(0, 1)).mean(0))


class Recurrent(nn.Module):
    def __init__(self, layer, batch_first, *, two_ways=False, packed=False):
        super().__init__()
        self.batch_first, self.packed = batch_first, packed
        self.layers = layer(WIDTH, 16, 3, dropout=0.4, batch_first=batch_first, bidirectional=two_ways)
        self.out = nn.Linear(16 * (1 + two_ways), 3)

    def forward(self, x, lengths):
        x = x if self.batch_first else x.transpose(0, 1)
        if self.packed:
            x = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), self.batch_first, enforce_sorted=False)
        steps, state = self.layers(x)
        if self.packed:
            steps, _ = nn.utils.rnn.pad_packed_sequence(steps, self.batch_first)
        last = state[0] if isinstance(state, tuple) else state
        return self.out(steps.sum(1 if self.batch_first else 0)) + last.sum((0, 2))[:, None]


KINDS = ("plain", "masked", "biased", "biased by sample", "causal", "two windows", "bfloat16", "checkpointed")
MODELS = {kind: lambda kind=kind: Attention(kind) for kind in KINDS} | {
    "encoder": Encoder,
    "LSTM": lambda: Recurrent(nn.LSTM, True),
    "LSTM, both ways": lambda: Recurrent(nn.LSTM, True, two_ways=True),
    "GRU": lambda: Recurrent(nn.GRU, False),
    "RNN": lambda: Recurrent(nn.RNN, False, two_ways=True),
    "LSTM, packed": lambda: Recurrent(nn.LSTM, True, packed=True),
    "GRU, packed": lambda: Recurrent(nn.GRU, False, two_ways=True, packed=True),
}


def trained(make):
    """The sum of the losses, that of squared weights, and the next number that the device draws."""
    torch.manual_seed(0)
    device = samestep.init().device
    data = torch.randn(22, LENGTH, WIDTH), torch.randint(2, LENGTH + 1, (22,)), torch.randint(3, (22,))
    net = make().to(device)
    model = samestep.replicate(net, same=True)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    total = 0.0
    for _ in range(2):
        for x, lengths, y in samestep.loader(TensorDataset(*data), 8, shuffle=True):
            loss = F.cross_entropy(model(x, lengths), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += samestep.mean(loss.item())
    weights = sum(weight.double().square().sum().item() for weight in net.parameters())
    return total, weights, torch.rand((), device=device).item()


def main():
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    if sys.argv[1:]:
        world = samestep.init()
        found = {name: trained(make) for name, make in MODELS.items()}
        if world.rank == 0:
            Path(sys.argv[1]).write_text(json.dumps(found))
        return
    found = {}
    with tempfile.TemporaryDirectory() as home:
        for size in (1, 2, 3):
            file = Path(home, str(size))
            launch = [sys.executable, "-m", "samestep", "run", "-n", str(size), "--tee", "0", __file__, file]
            ran = subprocess.run([str(word) for word in launch], check=True, capture_output=True, text=True)
            assert "serial script" not in ran.stderr, ran.stderr
            found[size] = json.loads(file.read_text())
    for name, serial in found[1].items():
        for size in (2, 3):
            wanted, rtol = torch.tensor(serial), ROUNDING.get(name, 1e-5)
            torch.testing.assert_close(torch.tensor(found[size][name]), wanted, rtol=rtol, atol=0.0, msg=name)
    print(f"{len(MODELS)} models have the serial script's numbers at 2 and 3 processes")


main()
