import torch
from accelerate import Accelerator
from torch.nn import functional as F
from torch.utils.data import DataLoader
from work import BATCH, EPOCHS, Net, notes, test_set, train_set

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
train = DataLoader(train_set, batch_size=BATCH // accelerator.num_processes, shuffle=True)
test = DataLoader(test_set, batch_size=500 // accelerator.num_processes)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)
for epoch in range(EPOCHS):
    model.train()
    for x, y in train:
        accelerator.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        notes.step()
    model.eval()
    correct = 0
    with torch.no_grad():
        for x, y in test:
            predicted, truth = accelerator.gather_for_metrics((model(x).argmax(1), y))
            correct += (predicted == truth).sum().item()
    accuracy = correct / len(test_set)
    accelerator.print(f"epoch {epoch}: {accuracy:.2%}")
if accelerator.is_main_process:
    notes.end(accuracy, accelerator.unwrap_model(model))
accelerator.end_training()
