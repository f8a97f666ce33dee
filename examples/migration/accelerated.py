"""Training with Accelerate; start it with `accelerate launch accelerated.py`, or with torchrun."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader, RandomSampler

from task import Net, test_set, train_set

accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
torch.manual_seed(0)
order = RandomSampler(train_set, generator=torch.Generator().manual_seed(0))
train = DataLoader(train_set, batch_size=64, sampler=order, drop_last=True)
test = DataLoader(test_set, batch_size=128)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)

for epoch in range(3):
    model.train()
    for x, y in train:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
    model.eval()
    correct = 0
    with torch.no_grad():
        for x, y in test:
            guesses, labels = accelerator.gather_for_metrics((model(x).argmax(1), y))
            correct += (guesses == labels).sum().item()
    accelerator.print(f"epoch {epoch}: {correct / len(test_set):.2%}")

accelerator.wait_for_everyone()
if accelerator.is_main_process:
    torch.save(accelerator.unwrap_model(model).state_dict(), "model.pt")
accelerator.end_training()
