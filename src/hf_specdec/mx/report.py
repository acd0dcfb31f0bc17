"""What compression did to a model: bytes and error of each layer, as data and as a table."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field

import torch


@dataclass(frozen=True)
class LayerReport:
    """One weight matrix. `format` is None where it stayed dense, `note` says why. `sqnr_db` is the signal-to-noise ratio of
    the weights, 10 log10(sum w^2 / sum (w - w')^2), in decibels; None where it was not measured."""

    name: str
    shape: tuple[int, ...]
    format: str | None
    bytes_before: int
    bytes_after: int
    sqnr_db: float | None = None
    max_error: float | None = None
    note: str = ""


@dataclass
class CompressionReport:
    """All layers of a model, in its own order."""

    layers: list[LayerReport] = field(default_factory=list)

    @property
    def compressed(self) -> list[LayerReport]:
        return [layer for layer in self.layers if layer.format is not None]

    @property
    def bytes_before(self) -> int:
        return sum(layer.bytes_before for layer in self.layers)

    @property
    def bytes_after(self) -> int:
        return sum(layer.bytes_after for layer in self.layers)

    def to_dict(self) -> dict:
        return {
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "layers": [asdict(layer) for layer in self.layers],
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1)

    def __str__(self) -> str:
        dense = len(self.layers) - len(self.compressed)
        saved = 1 - self.bytes_after / self.bytes_before if self.bytes_before else 0.0
        return (
            f"{len(self.compressed)} layers compressed, {dense} left dense: {self.bytes_before / 2**20:.1f} MiB to "
            f"{self.bytes_after / 2**20:.1f} MiB ({saved:.1%} smaller)"
        )


def weight_error(weight: torch.Tensor, packed) -> tuple[float, float]:
    """SQNR in decibels and the largest absolute difference, between a matrix and what its packed form is worth."""
    signal = noise = largest = 0.0
    for start in range(0, weight.shape[0], 1024):  # a few rows at a time: no second full-size copy
        rows = slice(start, start + 1024)
        exact = weight[rows].float()
        part = type(packed)(packed.codes[rows], packed.scales[rows], packed.format)
        difference = part.dequantize() - exact
        signal += float(exact.square().sum(dtype=torch.float64))
        noise += float(difference.square().sum(dtype=torch.float64))
        largest = max(largest, float(difference.abs().max()))
    return (10 * math.log10(signal / noise) if noise and signal else math.inf), largest
