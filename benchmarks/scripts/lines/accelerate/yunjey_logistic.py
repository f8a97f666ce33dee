import torch
import torch.nn as nn
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration

accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
print = accelerator.print

# Hyper-parameters
input_size = 28
num_classes = 10
num_epochs = 2
batch_size = 10
learning_rate = 0.001
torch.manual_seed(4)

train_dataset = torch.utils.data.TensorDataset(torch.rand(60, 1, 7, 4), torch.randint(0, 10, (60,)))
test_dataset = torch.utils.data.TensorDataset(torch.rand(35, 1, 7, 4), torch.randint(0, 10, (35,)))

# Data loader (input pipeline)
train_loader = torch.utils.data.DataLoader(dataset=train_dataset, batch_size=batch_size, shuffle=True)

test_loader = torch.utils.data.DataLoader(dataset=test_dataset, batch_size=batch_size, shuffle=False)

# Logistic regression model
model = nn.Linear(input_size, num_classes)

# Loss and optimizer
# nn.CrossEntropyLoss() computes softmax internally
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)

model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)

# Train the model
total_step = len(train_loader)
for epoch in range(num_epochs):
    for i, (images, labels) in enumerate(train_loader):
        # Reshape images to (batch_size, input_size)
        images = images.reshape(-1, input_size)

        # Forward pass
        outputs = model(images)
        loss = criterion(outputs, labels)

        # Backward and optimize
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()

        if (i + 1) % 2 == 0:
            loss = accelerator.reduce(loss.detach(), "mean")
            print(
                f"Epoch [{epoch + 1}/{num_epochs}], Step [{i + 1}/{total_step}], Loss: {loss.item():.4f}"
            )

# Test the model
# In test phase, we don't need to compute gradients (for memory efficiency)
with torch.no_grad():
    correct = 0
    total = 0
    for images, labels in test_loader:
        images = images.reshape(-1, input_size)
        outputs, labels = accelerator.gather_for_metrics((model(images), labels))
        _, predicted = torch.max(outputs.data, 1)
        total += labels.size(0)
        correct += (predicted == labels).sum()

    print(f"Accuracy of the model on the 10000 test images: {100 * correct / total} %")

# Save the model checkpoint
accelerator.save(accelerator.unwrap_model(model).state_dict(), "model.ckpt")
