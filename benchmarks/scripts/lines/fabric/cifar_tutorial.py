import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from lightning.fabric import Fabric

fabric = Fabric(devices=2, accelerator="cpu")
fabric.launch()
print = fabric.print

torch.manual_seed(12)
batch_size = 4 // fabric.world_size
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
net, optimizer = fabric.setup(net, optimizer)
trainloader, testloader = fabric.setup_dataloaders(trainloader, testloader)

for epoch in range(2):  # loop over the dataset multiple times
    trainloader.sampler.set_epoch(epoch)
    running_loss = 0.0
    for i, data in enumerate(trainloader, 0):
        # get the inputs; data is a list of [inputs, labels]
        inputs, labels = data

        # zero the parameter gradients
        optimizer.zero_grad()

        # forward + backward + optimize
        outputs = net(inputs)
        loss = criterion(outputs, labels)
        fabric.backward(loss)
        optimizer.step()

        # print statistics
        running_loss += fabric.all_reduce(loss.detach()).item()
        if i % 5 == 4:  # print every 5 mini-batches
            print(f"[{epoch + 1}, {i + 1:5d}] loss: {running_loss / 5:.3f}")
            running_loss = 0.0

print("Finished Training")
PATH = "./cifar_net.pth"
fabric.save(PATH, net.state_dict())
fabric.barrier()

net = Net().to(fabric.device)
net.load_state_dict(torch.load(PATH, weights_only=True))

correct = 0
total = 0
# since we're not training, we don't need to calculate the gradients for our outputs
with torch.no_grad():
    for data in testloader:
        images, labels = data
        outputs = net(images)
        _, predicted = torch.max(outputs, 1)
        total += labels.size(0)
        correct += (predicted == labels).sum().item()

correct = fabric.all_reduce(torch.tensor(correct), reduce_op="sum")
total = fabric.all_reduce(torch.tensor(total), reduce_op="sum")
print(f"Accuracy of the network on the 10000 test images: {100 * correct // total} %")

# prepare to count predictions for each class
correct_pred = dict.fromkeys(classes, 0)
total_pred = dict.fromkeys(classes, 0)

# again no gradients needed
with torch.no_grad():
    for data in testloader:
        images, labels = data
        outputs = net(images)
        _, predictions = torch.max(outputs, 1)
        # collect the correct predictions for each class
        for label, prediction in zip(labels, predictions):
            if label == prediction:
                correct_pred[classes[label]] += 1
            total_pred[classes[label]] += 1


# print accuracy for each class
for classname, correct_count in correct_pred.items():
    correct_count = fabric.all_reduce(torch.tensor(correct_count), reduce_op="sum")
    total_count = fabric.all_reduce(torch.tensor(total_pred[classname]), reduce_op="sum")
    accuracy = 100 * float(correct_count) / total_count
    print(f"Accuracy for class: {classname:5s} is {accuracy:.1f} %")
