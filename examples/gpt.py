"""Trains a small GPT on the characters of a text, on any number of processes, and prints some generated text."""

import argparse
import math
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

import samestep
from datasets import head, positive, text


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class GPT(nn.Module):
    def __init__(self, characters, length, width, heads, layers):
        super().__init__()
        self.length = length
        self.token = nn.Embedding(characters, width)
        self.place = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.ln = nn.LayerNorm(width)
        nn.init.normal_(self.token.weight, std=0.02)
        nn.init.normal_(self.place.weight, std=0.02)

    def forward(self, x):
        x = self.token(x) + self.place(torch.arange(x.shape[1], device=x.device))
        return self.ln(self.blocks(x)) @ self.token.weight.T


@torch.no_grad()
def write(model, start, count):
    """Continue a sequence of characters."""
    for _ in range(count):
        chances = model(start[:, -model.length :])[:, -1].float().softmax(-1)
        start = torch.cat([start, torch.multinomial(chances, 1)], dim=1)
    return start


def windows(tokens, length):
    """The text in pieces of equal length, each with the same piece moved by one character as its target."""
    count = (len(tokens) - 1) // length
    if count < 1:
        raise SystemExit(
            f"{len(tokens)} characters to train or test on hold no window of {length}; use a longer text"
        )
    x, y = tokens[: count * length], tokens[1 : count * length + 1]
    return TensorDataset(x.view(count, length), y.view(count, length))


def learning_rate(warmup, total):
    """A factor for each optimizer step: it rises linearly, then falls along a cosine to a tenth."""
    return lambda step: (
        (step + 1) / warmup
        if step < warmup
        else 0.55 + 0.45 * math.cos(math.pi * (step - warmup) / max(1, total - warmup))
    )


def loss_of(model, x, y, device, bf16):
    with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


@torch.no_grad()
def test(model, batches, device, bf16):
    model.eval()
    seen = {"loss": 0.0, "windows": 0}
    for x, y in batches:
        seen["loss"] += loss_of(model, x, y, device, bf16).item() * len(x)
        seen["windows"] += len(x)
    seen = samestep.sum(seen)
    return seen["loss"] / seen["windows"]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", help="folder of *.txt files (default: the help texts of Python itself)")
    parser.add_argument("--epochs", type=int, default=10, help="(default: 10)")
    parser.add_argument(
        "--batch-size", type=int, default=32, help="windows in a step, of all processes (default: 32)"
    )
    parser.add_argument("--length", type=positive, default=128, help="characters in a window (default: 128)")
    parser.add_argument("--width", type=positive, default=128, help="(default: 128)")
    parser.add_argument("--heads", type=positive, default=4, help="(default: 4)")
    parser.add_argument("--layers", type=positive, default=4, help="(default: 4)")
    parser.add_argument(
        "--lr", type=float, default=1e-3, help="highest learning rate of AdamW (default: 0.001)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and order (default: 0)")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16 where that is safe")
    parser.add_argument(
        "--log-interval", type=positive, default=50, help="steps between two lines (default: 50)"
    )
    parser.add_argument("--dry-run", action="store_true", help="one step and one test batch, then stop")
    args = parser.parse_args()
    if args.width % args.heads:
        parser.error(f"argument --heads: {args.heads} do not divide --width {args.width}")

    whole = text(args.data_dir)
    alphabet = sorted(set(whole))
    number = {character: i for i, character in enumerate(alphabet)}
    tokens = torch.tensor([number[character] for character in whole])
    cut = len(tokens) * 9 // 10
    train_data, test_data = windows(tokens[:cut], args.length), windows(tokens[cut:], args.length)
    if args.dry_run:
        train_data, test_data = head(train_data, args.batch_size), head(test_data, args.batch_size)
        args.epochs = 1

    world = samestep.init()
    device = world.device
    torch.manual_seed(args.seed)
    model = GPT(len(alphabet), args.length, args.width, args.heads, args.layers).to(device)
    model = samestep.replicate(model)
    train_batches = samestep.loader(train_data, args.batch_size, shuffle=True, seed=args.seed)
    test_batches = samestep.loader(test_data, 8 * args.batch_size)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr)
    scheduler = LambdaLR(optimizer, learning_rate(100, args.epochs * len(train_batches)))

    for epoch in range(1, args.epochs + 1):
        began = time.perf_counter()
        model.train()
        for step, (x, y) in enumerate(train_batches):
            loss = loss_of(model, x, y, device, args.bf16)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            if step % args.log_interval == 0:
                mean_loss = samestep.mean(loss.item())
                if world.rank == 0:
                    print(f"epoch {epoch} [{step}/{len(train_batches)}] loss {mean_loss:.4f}")
        speed = len(train_data) * args.length / (time.perf_counter() - began)
        test_loss = test(model, test_batches, device, args.bf16)
        if world.rank == 0:
            print(f"epoch {epoch}: test loss {test_loss:.4f}, {speed:.0f} characters/s")

    samestep.save("gpt.pt", model.state_dict())
    written = write(model, torch.tensor([[number.get("\n", 0)]], device=device), 300)
    if world.rank == 0:
        print("".join(alphabet[i] for i in written[0].tolist()))


if __name__ == "__main__":
    main()
