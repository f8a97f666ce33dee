import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration

accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
print = accelerator.print

torch.manual_seed(12)
batch_size = 4
classes = ("plane", "car", "bird", "cat")
trainset = torch.utils.data.TensorDataset(torch.rand(48, 3, 6, 6), torch.randint(0, 4, (48,)))
trainloader = torch.utils.data.DataLoader(trainset, batch_size=batch_size, shuffle=True, num_workers=0)
testset = torch.utils.data.TensorDataset(torch.rand(26, 3, 6, 6), torch.randint(0, 4, (26,)))
testloader = torch.utils.data.DataLoader(testset, batch_size=batch_size, shuffle=False, num_workers=0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3)
        self.pool = nn.MaxPool2d(2, 2)
        self.fc1 = nn.Linear(24, 12)
        self.fc2 = nn.Linear(12, 4)

    def forward(self, x):
        x = self.pool(F.relu(self.conv1(x)))
        x = torch.flatten(x, 1)  # flatten all dimensions except batch
        x = F.relu(self.fc1(x))
        return self.fc2(x)


net = Net()
criterion = nn.CrossEntropyLoss()
optimizer = optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
net, optimizer, trainloader, testloader = accelerator.prepare(net, optimizer, trainloader, testloader)

for epoch in range(2):  # loop over the dataset multiple times
    running_loss = 0.0
    for i, data in enumerate(trainloader, 0):
        # get the inputs; data is a list of [inputs, labels]
        inputs, labels = data

        # zero the parameter gradients
        optimizer.zero_grad()

        # forward + backward + optimize
        outputs = net(inputs)
        loss = criterion(outputs, labels)
        accelerator.backward(loss)
        optimizer.step()

        # print statistics
        running_loss += accelerator.reduce(loss.detach(), "mean").item()
        if i % 5 == 4:  # print every 5 mini-batches
            print(f"[{epoch + 1}, {i + 1:5d}] loss: {running_loss / 5:.3f}")
            running_loss = 0.0

print("Finished Training")
PATH = "./cifar_net.pth"
accelerator.save(accelerator.unwrap_model(net).state_dict(), PATH)
accelerator.wait_for_everyone()

net = Net().to(accelerator.device)
net.load_state_dict(torch.load(PATH, weights_only=True))

correct = 0
total = 0
# since we're not training, we don't need to calculate the gradients for our outputs
with torch.no_grad():
    for data in testloader:
        images, labels = data
        outputs, labels = accelerator.gather_for_metrics((net(images), labels))
        _, predicted = torch.max(outputs, 1)
        total += labels.size(0)
        correct += (predicted == labels).sum().item()

print(f"Accuracy of the network on the 10000 test images: {100 * correct // total} %")

# prepare to count predictions for each class
correct_pred = dict.fromkeys(classes, 0)
total_pred = dict.fromkeys(classes, 0)

# again no gradients needed
with torch.no_grad():
    for data in testloader:
        images, labels = data
        outputs, labels = accelerator.gather_for_metrics((net(images), labels))
        _, predictions = torch.max(outputs, 1)
        # collect the correct predictions for each class
        for label, prediction in zip(labels, predictions):
            if label == prediction:
                correct_pred[classes[label]] += 1
            total_pred[classes[label]] += 1


# print accuracy for each class
for classname, correct_count in correct_pred.items():
    accuracy = 100 * float(correct_count) / total_pred[classname]
    print(f"Accuracy for class: {classname:5s} is {accuracy:.1f} %")
