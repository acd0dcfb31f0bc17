"""What a call returns of every token beside its scores: hidden states and attentions, by the names that the outputs of a pass have for them."""

from __future__ import annotations

from typing import Any

import torch

from .attentions import Attentions
from .hidden_states import HiddenStates
from .kv_cache import SlotPlan


class PerToken:
    """asked: what a pass is told, so that it hands them out."""

    def __init__(self, parts: dict[str, HiddenStates | Attentions], asked: dict[str, bool]):
        self.parts, self.asked = parts, asked

    @classmethod
    def of(cls, generation: Any, plan: SlotPlan, rows: int, cached: int, windows: tuple[int | None, ...] | None) -> PerToken | None:
        """What a call asks for; None for nothing. windows: as of `Attentions`; None where no layer is attention."""
        asked = {name: True for name in ("output_hidden_states", "output_attentions") if getattr(generation, name, None)}
        if not asked or not generation.return_dict_in_generate:
            return None
        if generation.use_cache is False:
            raise ValueError(f"use_cache=False beside {' and '.join(f'{name}=True' for name in asked)}: plain generate() would hand out the whole text anew for every token. "
                             "Drop one of them, or use speculative=False.")
        if windows is None and "output_attentions" in asked:
            raise ValueError("output_attentions=True: no layer of the target is attention. Drop it.")
        parts = {"hidden_states": HiddenStates(plan, rows, cached)} if "output_hidden_states" in asked else {}
        parts |= {"attentions": Attentions(plan, rows, cached, windows or ())} if "output_attentions" in asked else {}
        return cls(parts, asked)

    def update(self, outputs: Any, starts: list[int]) -> None:
        """Keep what the planned block put out, which begins at place starts[b] of row b."""
        for name, part in self.parts.items():
            if (found := getattr(outputs, name, None)) is not None:
                part.update(found, starts)

    def gather(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """As `SlotLayer.gather`."""
        for part in self.parts.values():
            part.gather(source, target)

    def keep(self, rows: list[int]) -> None:
        """Only these rows go on."""
        for part in self.parts.values():
            part.keep(rows)

    def packed(self, columns: list[list[int]], prompt: int, lengths: list[int]) -> dict[str, tuple]:
        """By name, as `HiddenStates.packed`."""
        return {name: part.packed(columns, prompt, lengths) for name, part in self.parts.items()}
