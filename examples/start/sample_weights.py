"""
Learn sample weights: find wrong labels
=======================================

A third of the training labels are wrong. One weight per training sample is learned such that a classifier trained with
these weights is good on clean validation data. ``Checkpointed()`` keeps the memory of the 100 inner steps small.
"""

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

import bda_optim as bda

torch.manual_seed(0)
truth = torch.randn(20, 3)
inputs, val_inputs = torch.randn(600, 20), torch.randn(300, 20)
labels, val_labels = (inputs @ truth).argmax(1), (val_inputs @ truth).argmax(1)
wrong = torch.rand(600) < 1 / 3
labels[wrong] = (labels[wrong] + torch.randint(1, 3, (int(wrong.sum()),))) % 3


def lower(net, w, batch):
    return (torch.sigmoid(w) * F.cross_entropy(net(inputs), labels, reduction="none")).mean()


def upper(net, w, batch):
    return F.cross_entropy(net(val_inputs), val_labels)


model = torch.nn.Linear(20, 3)
w = torch.zeros(600, requires_grad=True)
inner = bda.BDAInnerOptimizer(model.parameters(), lr=1.0)
outer = torch.optim.Adam([w], lr=0.3)
for _ in range(30):
    outer.zero_grad()
    fmodel = inner.unroll(model, lower, upper, hyper=w, steps=100, adjoint=bda.Checkpointed())
    upper(fmodel, w, None).backward()
    outer.step()

found = w.detach() < 0
print(f"{(found & wrong).sum()} of {wrong.sum()} wrong labels found, {(found & ~wrong).sum()} false alarms")

weights = torch.sigmoid(w.detach())
plt.hist([weights[~wrong], weights[wrong]], bins=20, label=["right label", "wrong label"])
plt.xlabel("learned weight")
plt.ylabel("training samples")
plt.legend()
plt.show()
