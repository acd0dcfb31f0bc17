"""What a call returns of every token beside its scores: hidden states and attentions, by the names that the outputs of a pass have for them."""

from __future__ import annotations

from typing import Any

import torch

from . import compat
from .attentions import Attentions
from .hidden_states import HiddenStates
from .kv_cache import SlotPlan


class PerToken:
    """asked: what a pass is told, so that it hands them out. read: those of an encoder, by name."""

    def __init__(self, parts: dict[str, HiddenStates | Attentions], asked: dict[str, bool], read: dict[str, Any]):
        self.parts, self.asked, self.read = parts, asked, read

    @classmethod
    def of(cls, generation: Any, plan: SlotPlan, rows: int, cached: int, windows: tuple[int | None, ...] | None, read: Any = None) -> PerToken | None:
        """What a call asks for; None for nothing. windows: as of `Attentions`; None where no layer is attention. read: what an encoder has put out."""
        asked = {name: True for name in ("output_hidden_states", "output_attentions") if getattr(generation, name, None)}
        if not asked or not generation.return_dict_in_generate:
            return None
        if generation.use_cache is False:
            raise ValueError(f"use_cache=False beside {' and '.join(f'{name}=True' for name in asked)}: plain generate() would hand out the whole text anew for every token. "
                             "Pass use_cache=True, or speculative=False.")
        if windows is None and "output_attentions" in asked:
            raise ValueError("output_attentions=True: no layer of the target is attention. Drop it.")
        role = "" if read is None else "decoder_"
        parts = {f"{role}hidden_states": HiddenStates(plan, rows, cached)} if "output_hidden_states" in asked else {}
        if "output_attentions" in asked:
            parts |= {f"{role}attentions": Attentions(plan, rows, cached, windows or ())} | ({"cross_attentions": Attentions(plan, rows, windows=None)} if role else {})
        found = read if isinstance(read, dict) else {}
        return cls(parts, asked, {f"encoder_{name}": found.get(name) for name in ("hidden_states", "attentions") if role and f"output_{name}" in asked})

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
        return self.read | {name: part.packed(columns, prompt, lengths) for name, part in self.parts.items()}


def check_per_token(generation: Any, traits: compat.ModelTraits, rows: int) -> None:
    """ValueError for hidden states and attentions where they are not told apart by token; for those of rows that have ended, which Whisper's time stamps go by."""
    stamps = bool(getattr(generation, "return_token_timestamps", None))
    beyond = traits.encoder == "another's" or traits.own_cache or (generation.num_beams or 1) > 1 or stamps and rows > 1
    for name in ("output_attentions", "output_hidden_states") if beyond and generation.return_dict_in_generate else ():
        if getattr(generation, name, None):
            asked = ", which return_token_timestamps asks for" if stamps else ""
            raise ValueError(f"{name}=True{asked}: not available{' of several rows' if stamps else ''} from a pass that scores several tokens. Drop it, or use speculative=False.")
