"""
Learn a learning rate
=====================

The rate and the momentum of 50 training steps are learned by the validation loss at the end of training. Tensors that
require grad may stand wherever the optimizer takes a number. Two upper scalars and a long loop suit ``ForwardMode()``.
"""

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import nn

import bda_optim as bda

torch.manual_seed(0)
inputs, val_inputs = torch.randn(200, 10), torch.randn(200, 10)
targets, val_targets = (x[:, :1] * x[:, 1:2] + torch.sin(x[:, 2:3]) for x in (inputs, val_inputs))
model = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 1))
log_lr = torch.tensor(-5.0, requires_grad=True)
logit = torch.tensor(-2.0, requires_grad=True)
outer = torch.optim.Adam([log_lr, logit], lr=0.2)


def lower(net, hyper, batch):
    return F.mse_loss(net(inputs), targets)


rates, curves = [], []
for _ in range(30):
    inner = bda.BDAInnerOptimizer(model.parameters(), lr=log_lr.exp(), momentum=logit.sigmoid())
    fmodel = inner.unroll(model, lower, steps=50, adjoint=bda.ForwardMode())
    outer.zero_grad()
    F.mse_loss(fmodel(val_inputs), val_targets).backward()
    outer.step()
    rates.append(log_lr.exp().item())
    curves.append(fmodel.trace.lower)
print(f"rate {rates[0]:.3f} -> {rates[-1]:.3f}, momentum {logit.sigmoid():.2f}")
print(f"training loss after 50 steps: {curves[0][-1]:.3f} -> {curves[-1][-1]:.3f}")

for number in (0, 5, 10, 29):
    plt.semilogy(curves[number], label=f"upper iteration {number}, rate {rates[number]:.3f}")
plt.xlabel("inner step")
plt.ylabel("training loss")
plt.legend()
plt.show()
