"""Gemma 3n without timm, whose MobileNet reads its images: a convolution in its place."""

from __future__ import annotations

from contextlib import contextmanager
from importlib import import_module
from unittest.mock import patch

import torch
from transformers import AutoModel, PretrainedConfig
from transformers.modeling_outputs import BaseModelOutputWithPooling


class Patches(torch.nn.Module):
    def __init__(self, config: PretrainedConfig):
        super().__init__()
        self.patches = torch.nn.Conv2d(3, config.hidden_size, 8, 8)

    def forward(self, pixel_values: torch.Tensor, **kwargs) -> BaseModelOutputWithPooling:
        return BaseModelOutputWithPooling(last_hidden_state=self.patches(pixel_values))


class _Auto:
    @staticmethod
    def from_config(config: PretrainedConfig) -> torch.nn.Module:
        return Patches(config) if config.model_type == "gemma3n_vision" else AutoModel.from_config(config)


@contextmanager
def without_timm(config: PretrainedConfig):
    """Inside, models of this config are made without timm."""
    if config.model_type != "gemma3n":
        yield
        return
    with patch.object(import_module("transformers.models.gemma3n.modeling_gemma3n"), "AutoModel", _Auto):
        yield
