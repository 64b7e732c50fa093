"""Embeddings with a row for padding, which has no gradient: `vmap` gives that row one."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._support.torch_private import inside_transform, inside_vmap


class Embedding(nn.Embedding):
    """An embedding whose row for padding has no gradient in any task.

    Where `vmap` maps over weights and words, it joins the tables of all tasks to one, and the derivative leaves out the
    row for padding of the first alone (torch 2.13).
    """

    def forward(self, input: Tensor) -> Tensor:
        """Look up words."""
        if self.padding_idx is None or not inside_transform():
            return super().forward(input)
        scaled = self.scale_grad_by_freq
        found = F.embedding(input, self.weight, None, self.max_norm, self.norm_type, scaled, self.sparse)
        return torch.where(input.eq(self.padding_idx).unsqueeze(-1), found.detach(), found)


def refuse_mapping(module: nn.Module, inputs: Any) -> None:
    """Raise, before an embedding with a forward pass of its own, where `vmap` maps over it."""
    if inside_vmap():
        raise RuntimeError(
            f"{type(module).__name__} has a row for padding, to which vmap gives a gradient.\n"
            "Map over tasks with `tasks=`, which runs them one after another, or use nn.Embedding itself."
        )
