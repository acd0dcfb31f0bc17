"""Activation functions whose bits do not depend on where in a tensor a number lies."""

from __future__ import annotations

import torch
from torch import nn

# in bfloat16, torch gives each number the same bits wherever it lies in a tensor: all 65,536 values were tried
_ALIKE = ("SiLU", "SiLUActivation", "ReLU", "ReLU6", "Sigmoid", "Tanh", "Identity", "LinearActivation", "ReLUSquaredActivation")
# of more than one number, or of where it is
_WHOLE = ("Softmax", "Softmin", "LogSoftmax", "Softmax2d", "GLU", "PReLU", "RReLU", "MultiheadAttention")
_ACTIVATIONS = ("transformers.activations", "torch.nn.modules.activation")


class RowActivation(nn.Module):
    """An activation function in bfloat16 on a CPU, looked up in the table of its 65,536 values; other dtypes and devices go through as they are.

    torch computes the last numbers of a tensor by other code than the rest, so that a value's bits can depend on the width."""

    def __init__(self, original: nn.Module):
        super().__init__()
        self.original = original
        with torch.no_grad():
            self.table = original(torch.arange(65536, device="cpu").to(torch.int16).view(torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != torch.bfloat16 or x.requires_grad or not x.is_cpu:
            return self.original(x)
        codes = x.contiguous().view(torch.int16).to(torch.int32) & 0xFFFF
        return self.table.index_select(0, codes.flatten()).view(x.shape)


def needs_table(module: nn.Module) -> bool:
    """Whether it is a function of each number alone that torch does not compute alike at every place."""
    return type(module).__module__ in _ACTIVATIONS and type(module).__name__ not in (*_ALIKE, *_WHOLE)
