import math
import torch
from torch import nn
from torch.utils.data import DataLoader


class Output(dict):
    __getattr__ = dict.__getitem__


class Classifier(nn.Module):
    def __init__(self, vocab=30, d=8, labels=3):
        super().__init__()
        self.embed = nn.Embedding(vocab, d)
        self.cls = nn.Linear(d, labels)

    def forward(self, input_ids, attention_mask, labels=None):
        h = self.embed(input_ids) * attention_mask.unsqueeze(-1)
        logits = self.cls(h.sum(1) / attention_mask.sum(1, keepdim=True))
        loss = nn.functional.cross_entropy(logits, labels) if labels is not None else None
        return Output(loss=loss, logits=logits)


def collate(features):
    longest = max(len(f["input_ids"]) for f in features)
    ids = torch.zeros(len(features), longest, dtype=torch.long)
    mask = torch.zeros(len(features), longest)
    for i, f in enumerate(features):
        ids[i, : len(f["input_ids"])] = torch.tensor(f["input_ids"])
        mask[i, : len(f["input_ids"])] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([f["label"] for f in features])}


def make(n, seed):
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 7, (n,), generator=g).tolist()
    return [{"input_ids": torch.randint(1, 30, (k,), generator=g).tolist(), "label": int(torch.randint(0, 3, (1,), generator=g))} for k in lengths]


def main():
    torch.manual_seed(42)
    train_dataloader = DataLoader(make(41, 1), shuffle=True, collate_fn=collate, batch_size=8)
    eval_dataloader = DataLoader(make(19, 2), collate_fn=collate, batch_size=6)
    model = Classifier()
    no_decay = ["bias"]
    optimizer_grouped_parameters = [
        {"params": [p for n, p in model.named_parameters() if not any(nd in n for nd in no_decay)], "weight_decay": 0.01},
        {"params": [p for n, p in model.named_parameters() if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(optimizer_grouped_parameters, lr=5e-2)
    gradient_accumulation_steps = 2
    num_train_epochs = 3
    num_update_steps_per_epoch = math.ceil(len(train_dataloader) / gradient_accumulation_steps)
    max_train_steps = num_train_epochs * num_update_steps_per_epoch
    lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: max(0.0, 1 - s / max_train_steps))
    completed_steps = 0
    for epoch in range(num_train_epochs):
        model.train()
        total_loss = 0
        for step, batch in enumerate(train_dataloader):
            outputs = model(**batch)
            loss = outputs.loss
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
        samples_seen = correct = 0
        for step, batch in enumerate(eval_dataloader):
            with torch.no_grad():
                outputs = model(**batch)
            predictions = outputs.logits.argmax(dim=-1)
            correct += int((predictions == batch["labels"]).sum())
            samples_seen += batch["labels"].shape[0]
        print(f"epoch {epoch}: accuracy {correct / samples_seen:.4f} train_loss {total_loss.item() / len(train_dataloader):.5f}")
    torch.save(model.state_dict(), "pytorch_model.bin")


if __name__ == "__main__":
    main()
