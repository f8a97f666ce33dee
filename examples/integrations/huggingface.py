"""Fine-tunes a small BERT of Hugging Face with random weights, on a data set of `datasets`; nothing is downloaded."""

import torch
from transformers import BertConfig, BertForSequenceClassification

import samestep
from datasets import Dataset

world = samestep.init()
torch.manual_seed(0)
tokens = torch.randint(5, 100, (64, 12))
texts = Dataset.from_dict({"input_ids": tokens.tolist(), "labels": (tokens[:, 0] > 50).long().tolist()})
train = samestep.loader(texts.with_format("torch"), batch_size=16, shuffle=True)
config = BertConfig(
    vocab_size=100,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
net = BertForSequenceClassification(config).to(world.device)
model = samestep.replicate(net)
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

for epoch in range(2):
    losses = []
    for batch in train:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(samestep.mean(loss.item()))
    print(f"epoch {epoch}: {sum(losses) / len(losses):.4f}")

if world.rank == 0:
    model.save_pretrained("bert")
