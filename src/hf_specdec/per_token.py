"""What a call returns of every token beside its scores: hidden states and attentions, by the names that the outputs of a pass have for them."""

from __future__ import annotations

from typing import Any

import torch

from . import compat
from .attentions import Attentions
from .hidden_states import HiddenStates
from .kv_cache import SlotPlan
from .steps import steps


class PerToken:
    """asked: what a pass is told, so that it hands them out. cached: columns of the prompts that are in the cache. whole: whether plain generate reads the whole text anew for every
    token. read: those of an encoder, by name."""

    def __init__(self, parts: dict[str, HiddenStates | Attentions], asked: dict[str, bool], cached: int, whole: bool, read: dict[str, Any]):
        self.parts, self.asked, self.cached, self.whole, self.read = parts, asked, cached, whole, read

    @classmethod
    def of(cls, generation: Any, plan: SlotPlan, rows: int, cached: int, windows: tuple[int | None, ...] | None, read: Any, whole: bool) -> PerToken | None:
        """What a call asks for; None for nothing. windows: as of `Attentions`; None where no layer is attention. read: what an encoder has put out; None without one.
        whole: as `PerToken` has it."""
        asked = {name: True for name in ("output_hidden_states", "output_attentions") if getattr(generation, name, None)}
        if not asked or not generation.return_dict_in_generate:
            return None
        if windows is None and "output_attentions" in asked:
            raise ValueError("output_attentions=True: no layer of the target is attention. Drop it.")
        role = "" if read is None else "decoder_"
        parts = {f"{role}hidden_states": HiddenStates(plan, rows)} if "output_hidden_states" in asked else {}
        if "output_attentions" in asked:
            parts |= {f"{role}attentions": Attentions(plan, rows, windows or ())} | ({"cross_attentions": Attentions(plan, rows, windows=None)} if role else {})
        found = read if isinstance(read, dict) else {}
        return cls(parts, asked, cached, whole, {f"encoder_{name}": found.get(name) for name in ("hidden_states", "attentions") if role and f"output_{name}" in asked})

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
        """By name, of new tokens lengths[b] of row b, whose prompt has the `columns` of `prompt` that are no padding."""
        return self.read | {name: part.packed(steps(columns, prompt, self.cached, lengths, self.whole)) for name, part in self.parts.items()}


def check_per_token(generation: Any, traits: compat.ModelTraits, rows: int) -> None:
    """ValueError for hidden states and attentions where they are not told apart by token; for those of rows that have ended, which Whisper's time stamps go by."""
    stamps = bool(getattr(generation, "return_token_timestamps", None))
    beyond = traits.encoder == "another's" or (generation.num_beams or 1) > 1 or stamps and rows > 1
    for name in ("output_attentions", "output_hidden_states") if generation.return_dict_in_generate else ():
        if getattr(generation, name, None) and (beyond or traits.own_cache and name == "output_attentions"):
            asked = ", which return_token_timestamps asks for" if stamps else ""
            of = f" of num_beams={generation.num_beams} beams" if (generation.num_beams or 1) > 1 else " of several rows" if stamps else ""
            raise ValueError(f"{name}=True{asked}: not available{of} from a pass that scores several tokens. Drop it, or use speculative=False.")
