"""The shape of run_glue_no_trainer, without the library."""

import logging
import math
import random
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.optim import AdamW
from torch.utils.data import DataLoader, Dataset

logger = logging.getLogger(__name__)


def set_seed(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.cuda.manual_seed_all(seed)


class Texts(Dataset):
    def __init__(self, n):
        self.items = [
            {"input_ids": torch.randint(1, 20, (random.randint(3, 9),)), "labels": random.randint(0, 2)}
            for _ in range(n)
        ]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def data_collator(features):
    longest = max(len(f["input_ids"]) for f in features)
    ids = torch.zeros(len(features), longest, dtype=torch.long)
    for i, f in enumerate(features):
        ids[i, : len(f["input_ids"])] = f["input_ids"]
    return {
        "input_ids": ids,
        "attention_mask": (ids > 0).long(),
        "labels": torch.tensor([f["labels"] for f in features]),
    }


@dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(8, 3)

    def forward(self, input_ids, attention_mask, labels=None):
        hidden = self.embed(input_ids) * attention_mask.unsqueeze(-1)
        pooled = hidden.sum(1) / attention_mask.sum(1, keepdim=True)
        logits = self.head(self.dropout(pooled))
        loss = None
        if labels is not None:
            loss = nn.functional.cross_entropy(logits, labels)
        return Output(loss=loss, logits=logits)


def main():
    set_seed(14)
    per_device_train_batch_size, gradient_accumulation_steps, num_train_epochs = 6, 2, 2
    train_dataloader = DataLoader(
        Texts(44), shuffle=True, collate_fn=data_collator, batch_size=per_device_train_batch_size
    )
    eval_dataloader = DataLoader(Texts(19), collate_fn=data_collator, batch_size=per_device_train_batch_size)
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    model = Classifier()
    model.to(device)
    no_decay = ["bias", "LayerNorm.weight"]
    optimizer_grouped_parameters = [
        {
            "params": [p for n, p in model.named_parameters() if not any(nd in n for nd in no_decay)],
            "weight_decay": 0.01,
        },
        {
            "params": [p for n, p in model.named_parameters() if any(nd in n for nd in no_decay)],
            "weight_decay": 0.0,
        },
    ]
    optimizer = AdamW(optimizer_grouped_parameters, lr=5e-3)
    num_update_steps_per_epoch = math.ceil(len(train_dataloader) / gradient_accumulation_steps)
    max_train_steps = num_train_epochs * num_update_steps_per_epoch
    lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: max(0.0, 1 - s / max_train_steps))
    completed_steps = 0
    for epoch in range(num_train_epochs):
        model.train()
        total_loss = 0
        for step, batch in enumerate(train_dataloader):
            batch = {k: v.to(device) for k, v in batch.items()}
            outputs = model(**batch)
            loss = outputs.loss
            # We keep track of the loss at each epoch
            total_loss += loss.detach().float()
            loss = loss / gradient_accumulation_steps
            loss.backward()
            if step % gradient_accumulation_steps == 0 or step == len(train_dataloader) - 1:
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
                completed_steps += 1
            if completed_steps >= max_train_steps:
                break

        model.eval()
        samples_seen, right = 0, 0
        for step, batch in enumerate(eval_dataloader):
            batch.to(device) if hasattr(batch, "to") else None
            with torch.no_grad():
                outputs = model(**batch)
            predictions = outputs.logits.argmax(dim=-1)
            right += (predictions == batch["labels"]).sum().item()
            samples_seen += batch["labels"].shape[0]
        print(
            f"epoch {epoch}: accuracy {right / samples_seen:.4f} train_loss {total_loss.item() / len(train_dataloader):.4f}"
        )
    torch.save(model.state_dict(), "pytorch_model.bin")


if __name__ == "__main__":
    main()
