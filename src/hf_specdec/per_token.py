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
    def of(cls, asked: dict[str, bool], plan: SlotPlan, rows: int, cached: int, windows: tuple[int | None, ...] | None, read: Any, whole: bool,
           first: bool = False) -> PerToken | None:
        """What a call asks for, as `asked_for` has it; None for nothing. windows: as of `Attentions`; None where no layer is attention. read: what an encoder has put out;
        None without one. whole: as `PerToken` has it; first: as `HiddenStates`. ValueError for attentions where there are none."""
        if not asked:
            return None
        if windows is None and "output_attentions" in asked:
            raise ValueError("output_attentions=True: no layer of the target is attention. Drop it.")
        role = "" if read is None else "decoder_"
        parts = {f"{role}hidden_states": HiddenStates(plan, rows, first)} if "output_hidden_states" in asked else {}
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


def asked_for(generation: Any) -> dict[str, bool]:
    """What a call wants to be returned of every token."""
    return {name: True for name in ("output_hidden_states", "output_attentions") if generation.return_dict_in_generate and getattr(generation, name, None)}


def check_per_token(generation: Any, traits: compat.ModelTraits, rows: int, static: bool) -> None:
    """ValueError for hidden states and attentions where they are not told apart by token; for those of rows that have ended, which Whisper's time stamps go by; for attentions
    over the empty columns of a `static` cache."""
    stamps, beams = bool(getattr(generation, "return_token_timestamps", None)), generation.num_beams or 1
    why = f"of num_beams={beams} beams with use_cache=False" if beams > 1 and generation.use_cache is False else "of a decoder that looks at what another model has read" if traits.encoder == "another's" else \
        "of several rows" if stamps and rows > 1 else ""
    own = "of a model whose cache is of its own kind" if traits.own_cache else "over all columns of a static cache" if static else ""
    for name in asked_for(generation):
        if reason := why or (own if name == "output_attentions" else ""):
            said = ", which return_token_timestamps asks for" if stamps else ""
            raise ValueError(f"{name}=True{said}: not available {reason} with speculative=True. Drop it, or use speculative=False.")
