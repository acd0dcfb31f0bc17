"""What `generate` does to a prompt: the models, the options of a written speculative_config.json, and those of the command line, which go before."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from .common import check_draft, load_draft, parse_k


@dataclass(frozen=True)
class Work:
    """What is done to every prompt. sampling: `do_sample` and what goes with it, handed to `generate` as it is. config: of a speculative_config.json,
    whose options k, lenience, seed and draft replace where they are given. tokens: whether a data set's lines hold token ids."""

    target: str
    draft: str | None
    k: str | None
    max_new_tokens: int
    dtype: str
    mx: str | None
    raw: bool
    sampling: dict[str, Any]
    lenience: float | None
    seed: int | None
    tokens: bool
    config: Path | None = None

    def check(self) -> None:
        """ValueError for what can be refused before anything is loaded."""
        from ..mx.formats import get_format

        self.speculation  # noqa: B018  (says what is wrong with it)
        check_draft(self.draft)
        if self.mx is not None:
            get_format(self.mx)

    @cached_property
    def speculation(self):
        """The `SpeculativeConfig` in the folder (or file) `config`, the defaults without one, with what is not None in place of its own. A draft that is
        given takes the place of the config's, and of its options."""
        from .. import SpeculativeConfig

        base = SpeculativeConfig() if self.config is None else SpeculativeConfig.from_pretrained(self.config)
        given = {"num_assistant_tokens": None if self.k is None else parse_k(self.k), "lenience": self.lenience, "seed": self.seed}
        changed = {name: value for name, value in given.items() if value is not None}
        if self.draft is not None:
            changed |= {"draft": SpeculativeConfig.draft, "draft_options": {}, "draft_source": None, "predicted_speedup": None}
        return dataclasses.replace(base, **changed)

    def settings(self) -> dict[str, Any]:
        """What a run that goes on with a data set's folder has to have in common with those before, but for what the models say (`Writer.settings`)."""
        chosen = self.speculation
        sampling = {"sample" if name == "do_sample" else name: value for name, value in self.sampling.items()}
        return {
            "target": _place(self.target),
            "draft": _place(self.draft or chosen.draft),
            "config": self._beyond(),
            "mx": self.mx,
            "dtype": self.dtype,
            "k": str(chosen.num_assistant_tokens),
            "max_new_tokens": self.max_new_tokens,
            "raw": self.raw,
            "lenience": chosen.lenience,
            "seed": chosen.seed,
            "tokens": self.tokens,
            **dict.fromkeys(("temperature", "top_k", "top_p", "min_p", "repetition_penalty")),
            **sampling,
        }

    def _beyond(self) -> dict[str, Any] | None:
        """The options of the config that differ from the defaults and have no option of the command line, None for none."""
        own, known = self.speculation.to_dict(), type(self.speculation)().to_dict()
        left = {name: value for name, value in own.items() if value != known[name] and name not in ("num_assistant_tokens", "lenience", "seed", "draft", "predicted_speedup")}
        return left or None

    def load_draft(self, model, tokenizer) -> tuple[Any, Any]:
        """What goes into `assistant_model`, None where the config names the draft; and the draft that it will be. Every call makes the config's own anew, around
        weights that are kept, so that none depends on the calls before."""
        from .. import SpeculativeDecoder

        if self.draft is not None:
            made = load_draft(self.draft, self.dtype, model, tokenizer)
            return made, made
        decoder = SpeculativeDecoder(config=self.speculation)
        decoder.load(model)
        return None, decoder.draft

    def of_rows(self) -> Work:
        """The same for the rows of a data set, whose seeds are made of one number. ValueError where a config has several."""
        seed = self.speculation.seed
        if isinstance(seed, tuple):
            raise ValueError(f"--config {self.config}: its seeds are of rows that were decoded together; give --seed.")
        return dataclasses.replace(self, seed=seed or 0)


def _place(name: str) -> str:
    return str(Path(name).resolve()) if Path(name).exists() else name
