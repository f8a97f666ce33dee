import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(36)
T, alpha = 2.0, 0.3


def distillation_loss(student_logits, teacher_logits, labels):
    soft = nn.KLDivLoss(reduction="batchmean")(F.log_softmax(student_logits / T, dim=1), F.softmax(teacher_logits / T, dim=1)) * (T * T)
    hard = F.cross_entropy(student_logits, labels)
    return alpha * hard + (1 - alpha) * soft, hard, soft


teacher = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 4)).eval()
for p in teacher.parameters():
    p.requires_grad_(False)
student = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 4))
optimizer = torch.optim.SGD([p for p in student.parameters() if p.requires_grad], lr=0.1, momentum=0.9, nesterov=True)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=14)
loader = DataLoader(TensorDataset(torch.randn(50, 5), torch.randint(0, 4, (50,))), batch_size=8, shuffle=True)
for epoch in range(2):
    sums = [0.0, 0.0]
    agree = 0
    for x, y in loader:
        with torch.no_grad():
            t = teacher(x)
        s = student(x)
        loss, hard, soft = distillation_loss(s, t, y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        scheduler.step()
        sums[0] += hard.item() * x.size(0)
        sums[1] += soft.item() * x.size(0)
        agree += (s.argmax(1) == t.argmax(1)).float().sum().item()
    n = len(loader.dataset)
    print(f"epoch {epoch} hard {sums[0] / n:.5f} soft {sums[1] / n:.5f} agree {agree / n:.3f} lr {scheduler.get_last_lr()[0]:.6f}")
torch.save(student.state_dict(), "student.pt")
