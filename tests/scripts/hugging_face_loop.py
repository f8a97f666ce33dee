"""A model that returns an output object with its loss, accumulation and a warm-up, as in accelerate's examples.

verdict: same
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

import samestep


@dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.classifier = nn.Embedding(20, 8), nn.Linear(8, 2)

    def forward(self, input_ids, labels):
        logits = self.classifier(torch.tanh(self.embed(input_ids).mean(1)))
        return Output(F.cross_entropy(logits, labels), logits)


class Texts(torch.utils.data.Dataset):
    def __init__(self):
        self.ids, self.labels = torch.randint(0, 20, (40, 5)), torch.randint(0, 2, (40,))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, at):
        return {"input_ids": self.ids[at], "labels": self.labels[at]}


torch.manual_seed(0)
device = samestep.init().device
train_dataloader = samestep.loader(Texts(), 4, shuffle=True, num_workers=0)
eval_dataloader = samestep.loader(Texts(), 8, num_workers=0)
model = samestep.replicate(Model().to(device))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
for epoch in range(2):
    model.train()
    for step, batch in enumerate(train_dataloader):
        batch = {name: value.to(device) for name, value in batch.items()}
        loss = model(**batch).loss / 2
        loss.backward()
        if step % 2 == 1:
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    model.eval()
    predictions, references = [], []
    for batch in eval_dataloader:
        with torch.no_grad():
            outputs = model(**batch)
        predictions.append(samestep.gather(outputs.logits.argmax(-1)))
        references.append(samestep.gather(batch["labels"]))
    right = (torch.cat(predictions) == torch.cat(references)).float().mean()
    print(f"epoch {epoch}: accuracy {right:.3f}")
