"""What compression did to a model: bytes and error of each layer, as data and as a table."""

from __future__ import annotations

import html
import json
import math
from dataclasses import asdict, dataclass, field

import torch

COLUMNS = ("layer", "shape", "format", "MiB before", "after", "SQNR dB")


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


@dataclass(frozen=True)
class LayerGroup:
    """Layers that are alike but for the numbers in their names: `model.layers.0-29.mlp.up_proj`. Bytes are sums; `sqnr_db` is the
    lowest and the highest."""

    name: str
    count: int
    shape: tuple[int, ...]
    format: str | None
    bytes_before: int
    bytes_after: int
    sqnr_db: tuple[float, float] | None
    note: str


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

    def groups(self) -> list[LayerGroup]:
        """The layers, with those of different blocks that are alike as one, in the order in which they first appear."""
        found: dict[tuple, list[LayerReport]] = {}
        for layer in self.layers:
            pattern = tuple(None if part.isdecimal() else part for part in layer.name.split("."))
            found.setdefault((pattern, layer.shape, layer.format, layer.note), []).append(layer)
        return [_group(layers) for layers in found.values()]

    def to_dict(self) -> dict:
        return {
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "layers": [asdict(layer) for layer in self.layers],
        }

    def to_json(self) -> str:
        """Strict JSON: the SQNR of a layer without an error, which is infinite, is null."""
        found = self.to_dict()
        for layer in found["layers"]:
            layer["sqnr_db"] = layer["sqnr_db"] if layer["sqnr_db"] is None or math.isfinite(layer["sqnr_db"]) else None
        return json.dumps(found, indent=1, allow_nan=False)

    def rows(self, every_layer: bool = False) -> list[tuple[str, ...]]:
        """What people read of the layers, as `COLUMNS` says; those that are alike as one, unless each is wanted."""
        return [_row(layer, every_layer) for layer in (self.layers if every_layer else self.groups())]

    def _repr_html_(self) -> str:
        lines = [f"<tr>{''.join(f'<{kind}>{html.escape(cell)}</{kind}>' for cell in row)}</tr>" for kind, row in
                 (("th", COLUMNS), *(("td", row) for row in self.rows()))]
        return f"<table>{''.join(lines)}</table><p>{html.escape(str(self))}</p>"

    def __str__(self) -> str:
        dense = len(self.layers) - len(self.compressed)
        saved = 1 - self.bytes_after / self.bytes_before if self.bytes_before else 0.0
        return (
            f"{len(self.compressed)} layers compressed, {dense} left dense: {self.bytes_before / 2**20:.1f} MiB to "
            f"{self.bytes_after / 2**20:.1f} MiB ({abs(saved):.1%} {'smaller' if saved >= 0 else 'larger'})"
        )


def _group(layers: list[LayerReport]) -> LayerGroup:
    first, measured = layers[0], [layer.sqnr_db for layer in layers if layer.sqnr_db is not None]
    return LayerGroup(
        ".".join(_ranges(set(parts)) for parts in zip(*(layer.name.split(".") for layer in layers))),
        len(layers),
        first.shape,
        first.format,
        sum(layer.bytes_before for layer in layers),
        sum(layer.bytes_after for layer in layers),
        (min(measured), max(measured)) if measured else None,
        first.note,
    )


def _ranges(parts: set[str]) -> str:
    """One part of the names: itself if it is the same in all, or numbers as in "0-3,5"."""
    if len(parts) == 1:
        return next(iter(parts))
    runs: list[list[int]] = []
    for number in sorted(map(int, parts)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def _row(layer: LayerReport | LayerGroup, every_layer: bool) -> tuple[str, ...]:
    name = layer.name if every_layer or layer.count == 1 else f"{layer.name} ({layer.count})"
    kind = f"dense: {layer.note}" if layer.format is None else layer.format + (f" ({layer.note})" if layer.note else "")
    return name, " x ".join(map(str, layer.shape)), kind, mebibytes(layer.bytes_before), mebibytes(layer.bytes_after), _decibels(layer.sqnr_db)


def mebibytes(size: int) -> str:
    return f"{size / 2**20:.1f}" if size >= 2**20 else f"{size / 2**20:.3f}"


def _decibels(value: float | tuple[float, float] | None) -> str:
    if value is None:
        return "-"
    low, high = value if isinstance(value, tuple) else (value, value)
    return f"{low:.1f}" if f"{low:.1f}" == f"{high:.1f}" else f"{low:.1f} to {high:.1f}"


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
