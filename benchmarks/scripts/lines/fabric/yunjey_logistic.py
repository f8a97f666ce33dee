import torch
import torch.nn as nn
from lightning.fabric import Fabric

fabric = Fabric(devices=2, accelerator="cpu")
fabric.launch()
print = fabric.print

# Hyper-parameters
input_size = 28
num_classes = 10
num_epochs = 2
batch_size = 10 // fabric.world_size
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

model, optimizer = fabric.setup(model, optimizer)
train_loader, test_loader = fabric.setup_dataloaders(train_loader, test_loader)

# Train the model
total_step = len(train_loader)
for epoch in range(num_epochs):
    train_loader.sampler.set_epoch(epoch)
    for i, (images, labels) in enumerate(train_loader):
        # Reshape images to (batch_size, input_size)
        images = images.reshape(-1, input_size)

        # Forward pass
        outputs = model(images)
        loss = criterion(outputs, labels)

        # Backward and optimize
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()

        if (i + 1) % 2 == 0:
            loss = fabric.all_reduce(loss.detach())
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
        outputs = model(images)
        _, predicted = torch.max(outputs.data, 1)
        total += labels.size(0)
        correct += (predicted == labels).sum()
    total = fabric.all_reduce(torch.tensor(total), reduce_op="sum")
    correct = fabric.all_reduce(correct, reduce_op="sum")

    print(f"Accuracy of the model on the 10000 test images: {100 * correct / total} %")

# Save the model checkpoint
fabric.save("model.ckpt", model.state_dict())
