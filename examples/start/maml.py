"""
Learn an initialisation: MAML
=============================

A small network learns initial weights from which a few gradient steps on ten points fit a new sine wave. All waves of a
batch are adapted at once with ``tasks=25``. The upper variables are the weights of the network itself, so
``copy_initial_weights=False`` lets gradients reach them.
"""

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import nn

import bda_optim as bda

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1))
inner = bda.BDAInnerOptimizer(net.parameters(), lr=0.05)
outer = torch.optim.Adam(net.parameters(), lr=2e-3)


def waves(count):
    """Draw sine waves: ten points of each to adapt to, and ten others to judge by."""
    x = 10 * torch.rand(2, count, 10, 1) - 5
    y = (0.5 + 2 * torch.rand(count, 1, 1)) * torch.sin(x + 3 * torch.rand(count, 1, 1))
    return (x[0], y[0]), (x[1], y[1])


def loss(net, hyper, batch):
    return F.mse_loss(net(batch[0]), batch[1])


history = []
for _ in range(300):
    support, query = waves(25)
    fnet = inner.unroll(net, loss, steps=5, batches=[support] * 5, tasks=25, copy_initial_weights=False)
    upper = fnet.losses(loss, None, query).mean()
    outer.zero_grad()
    upper.backward()
    outer.step()
    history.append(upper.item())
print(f"error after five steps: {history[0]:.2f} at first, {sum(history[-20:]) / 20:.2f} in the end")

plt.semilogy(history)
plt.xlabel("upper iteration")
plt.ylabel("error on new points, after five steps")
plt.show()
