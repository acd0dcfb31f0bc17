"""What a call returns: transformers' outputs with a trace, and scores, logits and caches in the shapes that transformers gives them."""

from __future__ import annotations

import torch
from transformers import DynamicCache, StaticCache
from transformers.generation import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from .caches import write_cache
from .trace import SpeculationTrace


class WithTrace:
    """An output with `speculation`, by name and by key; `keys()` are transformers' own."""

    speculation: SpeculationTrace | None = None

    def __getitem__(self, key):
        return self.speculation if key == "speculation" else super().__getitem__(key)


class SpeculativeOutput(WithTrace, GenerateDecoderOnlyOutput):
    """`GenerateDecoderOnlyOutput` with `speculation`, the `SpeculationTrace` of the call."""


class SpeculativeSeq2SeqOutput(WithTrace, GenerateEncoderDecoderOutput):
    """`GenerateEncoderDecoderOutput` with `speculation`, the `SpeculationTrace` of the call."""


def stacked(rows: list[list[torch.Tensor]]) -> tuple[torch.Tensor, ...]:
    """Per committed token [B, V]; rows that have ended carry zeros."""
    width = max(map(len, rows))
    blank = torch.zeros_like(next(row for row in rows if row)[0]) if width else None
    return tuple(torch.stack([row[i] if i < len(row) else blank for row in rows]) for i in range(width))


def assemble_cache(config, rows: list[list], columns: list[list[int]], width: int, into: DynamicCache | StaticCache | None) -> DynamicCache | StaticCache:
    """A plain `DynamicCache` in the coordinates of the returned sequences, `width` columns: slot s of row b (as `CachedModel.row`
    gives it) goes to column columns[b][s]; what has no slots, [1, H, n, D], stays as it is. `into` is refilled in place if given."""
    alike = len(rows) == 1 and columns[0][:width] == list(range(width))  # one row without padding: its slots are the columns
    layers = []
    for parts in zip(*rows):
        if parts[0] is None:
            layers.append(None)
        elif parts[0][0].ndim == 4:  # of what the prompts show
            layers.append(tuple(torch.cat(pieces) for pieces in zip(*parts)))
        elif alike and parts[0][0].shape[1] == width:
            layers.append(tuple(piece[None] for piece in parts[0]))
        else:
            layers.append(tuple(_in_columns(pieces, columns, width) for pieces in zip(*parts)))
    return write_cache(config, layers, into)


def _in_columns(pieces: tuple[torch.Tensor, ...], columns: list[list[int]], width: int) -> torch.Tensor:
    """[B, H, width, D] of pieces [H, n, D]."""
    out = pieces[0].new_zeros((len(pieces), pieces[0].shape[0], width, pieces[0].shape[2]))
    for b, piece in enumerate(pieces):
        places = [column for column in columns[b][: piece.shape[1]] if column < width]
        together = places and places[-1] - places[0] + 1 == len(places)
        out[b, :, slice(places[0], places[-1] + 1) if together else places] = piece[:, : len(places)]
    return out
