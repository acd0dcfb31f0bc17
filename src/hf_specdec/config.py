"""`SpeculativeConfig`: every choice of a speculative call, in one frozen, JSON-able place."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from .draft_stop import CHOICES
from .hints import by_name, check_bool, check_int, check_path, meant, nearest, short, what
from .registry import ACCEPTANCE, DRAFTS, MTP, shipped

CONFIG_NAME = "speculative_config.json"
MAX_ASSISTANT_TOKENS = 64  # drafted in one round, by any draft
ALONE = ("jump_forward", "lookahead", "mixture", "ngram_recycling", "prompt_lookup", "recycling", "suffix_automaton", "uniform")  # drafts that a name is enough for
OF_TARGET = ("compressed",)  # that are made of the target
WITH_WEIGHTS = ("model", "model_tree", "ngram", "retrieval", "feature", "feature_parallel", "feature_tree", "medusa", "parallel", "pass", "prefixed", "sequential", "shared_kv", "dflash")
# what newcomers put among the options, and is an argument of `generate`
OF_GENERATE = ("assistant_model", "assistant_tokenizer", "do_sample", "generation_config", "logits_processor", "max_length", "max_new_tokens", "min_new_tokens",
               "num_beams", "return_dict_in_generate", "stop_strings", "stopping_criteria", "streamer", "temperature", "tokenizer", "top_k", "top_p")


@dataclass(frozen=True)
class SpeculativeConfig:
    """How to speculate.

    num_assistant_tokens: K, the tokens drafted per round, 1..64, or "auto" (default): chosen every round from the measured
        acceptance and cost, 0 where speculation does not pay.
    draft: the draft used when no `assistant_model` is passed: a registered one (default "prompt_lookup"), or a drafter, by the name of one that
        comes with the package ("smollm2_drafter") or by the folder that `hf-specdec train` has written; "mtp": the prediction module of the target's own checkpoint;
        "compressed": the target itself with weights of fewer bits, made by the first call (`mx.draft_of`, whose arguments are `draft_options`).
    acceptance: "auto" (default: "greedy" without `do_sample`, "speculative_sampling" with it) or a registered rule.
    lenience: l of Leviathan et al. 2023, A.5, in (0, 1]; 1.0 (default) is exact. Below 1 no token is committed with a
        probability above p(x) / l when sampling, and p(x) >= l * max p counts as the argmax when greedy.
    seed: an int (row b uses seed + b) or one int per row; None (default) takes it from torch's global generator. A row's
        text depends on its own seed only, but for drafts that share a memory or a tree between rows. With a seed, "auto" leaves
        measured times aside, so that a run repeats.
    max_auto_tokens: the largest K that "auto" may choose, 1..64 (default 16).
    draft_stop: when the draft stops: "constant" (default, at K); "heuristic" (K grows by 2 after full acceptance and falls by 1
        otherwise, "auto" begins with 5); for a draft model, before K or `max_auto_tokens` too: "confidence" (after a token whose acceptance,
        estimated from the draft's probability of it, is below `draft_confidence`; before it, where DSpark's confidence head says so) or
        "expected_gain" (when another draft step costs more than the tokens it is expected to add). All are exact.
    draft_confidence: of draft_stop="confidence", in (0, 1] (default 0.4).
    typical_epsilon, typical_delta: of acceptance="typical", numbers in (0, 1]; threshold: of acceptance="threshold", in (0, 1]
        (default 0.09, 0.3, 0.3).
    record_probs: whether the trace keeps p and q of every committed and every rejected token (default False).
    draft_options: keyword arguments of that draft, as JSON has them, such as {"branches": 4}; the draft checks them.
    draft_source: the folder, file or hub id of a draft that has weights ("model", "model_tree", "ngram", "retrieval"), or a drafter as in `draft` ("feature",
        "feature_parallel", "feature_tree", "medusa", "parallel", "pass", "prefixed", "sequential", or "model", "model_tree"), or an assistant that a family of models ships
        ("shared_kv", "dflash"), which is loaded where no `assistant_model` is passed: safetensors only, no code. The last model is kept, and a drafter as long as its target.
    compile: whether passes are compiled (`torch.compile`) over fixed shapes, the target's and a draft model's (default False): "layers" (one function
        for all layers alike), "model" (the whole pass: up to a fifth faster for a small model, six times as long to compile), or True
        ("layers" on a CPU, "model" with CUDA graphs on a GPU; encoder-decoders always "model"). The first pass of a shape takes a while: `hf_specdec.warmup` has it done before. A model
        that does not compile runs as it is, with one warning while it lives.
    predicted_speedup: what `hf-specdec tune` predicted of decoding with this config; nothing depends on it.

    Raises ValueError naming the argument and the remedy.
    """

    num_assistant_tokens: int | str = "auto"
    draft: str = "prompt_lookup"
    acceptance: str = "auto"
    lenience: float = 1.0
    seed: int | tuple[int, ...] | None = None
    max_auto_tokens: int = 16
    record_probs: bool = False
    typical_epsilon: float = 0.09
    typical_delta: float = 0.3
    threshold: float = 0.3
    draft_stop: str = "constant"
    draft_confidence: float = 0.4
    draft_options: dict[str, Any] = field(default_factory=dict, hash=False)
    draft_source: str | None = None
    compile: bool | str = False
    predicted_speedup: float | None = None

    def __post_init__(self):
        if self.num_assistant_tokens != "auto":
            check_int("num_assistant_tokens", self.num_assistant_tokens, 1, MAX_ASSISTANT_TOKENS, ' or "auto"')
        check_int("max_auto_tokens", self.max_auto_tokens, 1, MAX_ASSISTANT_TOKENS)
        if not isinstance(self.draft, str) or self.draft not in DRAFTS and not _is_drafter(self.draft):
            choice = f"choose one of {[*ALONE, *OF_TARGET]}, a drafter ({[*shipped(), 'mtp']}, or its folder), one of {list(WITH_WEIGHTS)} with draft_source"
            if isinstance(self.draft, str) and "+" in self.draft:
                options = json.dumps({"drafts": self.draft.split("+"), "mode": "choose"})
                raise ValueError(f'draft={self.draft!r}: names with + between them are for the command line. Here it is draft="mixture" with draft_options={options}.')
            if not isinstance(self.draft, str):
                raise ValueError(f"draft={short(self.draft)} is no name: pass the draft as assistant_model, beside speculative=, or {choice}.")
            if "/" in self.draft:
                held = "a folder without one" if Path(self.draft).is_dir() else "no folder"
                raise ValueError(f'draft={self.draft!r}: a path here is that of a drafter (drafter.json), and this is {held}. A model, by its folder or hub id, is '
                                 f'draft="model" with draft_source={self.draft!r}.')
            raise ValueError(f"draft={self.draft!r} is not known{meant(self.draft, [*DRAFTS, *shipped()])}; {choice}, or pass the draft as assistant_model.")
        if not isinstance(self.acceptance, str) or self.acceptance not in ("auto", *ACCEPTANCE):
            raise ValueError(f"acceptance={short(self.acceptance)} is not known{meant(self.acceptance, ACCEPTANCE)}; choose one of "
                             f"{['auto', *sorted(ACCEPTANCE)]}.")
        _check_fraction("lenience", self.lenience, "; 1.0 keeps the output exact")
        if not isinstance(self.draft_stop, str) or self.draft_stop not in CHOICES:
            raise ValueError(f"draft_stop={short(self.draft_stop)} is not known{meant(self.draft_stop, CHOICES)}; choose one of {list(CHOICES)}.")
        for name in ("typical_epsilon", "typical_delta", "threshold", "draft_confidence"):
            _check_fraction(name, getattr(self, name))
        check_bool("record_probs", self.record_probs)
        if not isinstance(self.compile, bool) and self.compile not in ("layers", "model"):
            raise ValueError(f'compile={self.compile!r} must be False, True, "layers" (one function for all layers) or "model" (whole passes).')
        _check_draft(self.draft, self.draft_options, self.draft_source)
        object.__setattr__(self, "draft_options", dict(self.draft_options))
        speedup = self.predicted_speedup
        if speedup is not None and (isinstance(speedup, bool) or not isinstance(speedup, (int, float)) or not 0 < speedup < math.inf):
            raise ValueError(f"predicted_speedup={speedup!r} must be a number above 0, or None.")
        if isinstance(self.seed, list):
            object.__setattr__(self, "seed", tuple(self.seed))
        seeds = self.seed if isinstance(self.seed, tuple) else () if self.seed is None else (self.seed,)
        if any(isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63 for seed in seeds):
            raise ValueError(f"seed={self.seed!r} must be an int in 0..2**63-1, or one such int per row.")

    @classmethod
    def resolve(cls, value: SpeculativeConfig | dict | bool | None, **overrides: Any) -> SpeculativeConfig:
        """The config meant by `speculative=value`, with every override that is not None applied."""
        if value is None or value is True:
            config = cls()
        elif isinstance(value, cls):
            config = value
        elif isinstance(value, dict):
            config = cls.from_dict(value)
        else:
            raise ValueError(f"speculative={short(value)} must be True, False, a dict or a SpeculativeConfig.{_meant_by(value)}")
        return replace(config, **{name: item for name, item in overrides.items() if item is not None})

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> SpeculativeConfig:
        if not isinstance(values, Mapping):
            raise TypeError(f"values: expected a dict of options, got {what(values)}.")
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(values) - set(known), key=str)
        if unknown:
            raise ValueError(f"unknown speculative option {unknown[0]!r}{_hint(unknown[0], known)}; the options are {known}.")
        return cls(**values)

    def save_pretrained(self, folder: str | Path) -> Path:
        """Write `speculative_config.json` into `folder` (created if missing) and return its path."""
        path = check_path("folder", folder)
        if path.exists() and not path.is_dir():
            raise ValueError(f"folder={str(folder)!r} is a file; name a folder, into which {CONFIG_NAME} is written.")
        path.mkdir(parents=True, exist_ok=True)
        path = path / CONFIG_NAME
        path.write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")
        return path

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> SpeculativeConfig:
        """Read `speculative_config.json` from `folder` (or the named file). Unknown keys and non-finite numbers raise."""
        path = check_path("folder", folder)
        path = path / CONFIG_NAME if path.is_dir() else path
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{path}: there is no such file. Name a folder that SpeculativeConfig.save_pretrained or `hf-specdec tune` has written.") from error
        except ValueError as error:
            raise ValueError(f"{path}: not a JSON file ({error}). Write it with SpeculativeConfig.save_pretrained.") from error
        if not isinstance(values, dict):
            raise ValueError(f"{path}: expected a JSON object.")
        try:
            return cls.from_dict(values)
        except ValueError as error:
            own = path.with_name(CONFIG_NAME)
            meant = f"; the options lie beside it: name {own}, or its folder." if own != path and own.is_file() else ""
            raise ValueError(f"{path}: {str(error).rstrip('.') if meant else error}{meant}") from error


def _hint(name: Any, known: list[str]) -> str:
    if isinstance(name, str) and name in OF_GENERATE:
        return f": {name} is an argument of generate(), beside speculative="
    also = ", or assistant_model of generate() for a model" if nearest(name, known) == "draft" else ""
    return meant(name, known) + also


SpeculativeConfig.__init__ = by_name(SpeculativeConfig.__init__, _hint)


def _check_fraction(name: str, value: Any, also: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or not 0 < value <= 1:
        raise ValueError(f"{name}={value!r} must be a number in (0, 1]{also}.")


def _is_drafter(name: str) -> bool:
    return bool(name) and (name in (*shipped(), MTP) or (Path(name) / "drafter.json").is_file())


def _meant_by(value: Any) -> str:
    """What to write in the place of speculative=value, where that is plain."""
    if value is SpeculativeConfig:
        return " Pass an instance: SpeculativeConfig()."
    if hasattr(value, "propose") or hasattr(value, "generate"):
        return " A draft is passed as assistant_model, beside speculative=True."
    return f' Pass speculative={{"draft": "{value}"}}.' if isinstance(value, str) and (value in (*ALONE, *OF_TARGET) or _is_drafter(value)) else ""


def instead_of(thing: Any, options: str = "speculative") -> str:
    """What to pass in the place of a name, a class or options, where a draft is wanted; options: the argument that takes options."""
    if isinstance(thing, (dict, SpeculativeConfig)):
        return f" Options go into {options}=: {options}={thing!r}." if isinstance(thing, dict) else f" A SpeculativeConfig is passed as {options}=."
    if hasattr(thing, "_orig_mod"):
        return f' Pass the model that was given to torch.compile; {options}={{"compile": True}} compiles its passes.'
    if isinstance(thing, type) and hasattr(thing, "from_pretrained"):
        return f" Load one: {thing.__name__}.from_pretrained(...)."
    if isinstance(thing, type) and hasattr(thing, "propose"):
        needed = any(given.default is given.empty for given in inspect.signature(thing).parameters.values())
        return f" Pass an instance: {thing.__name__}({'...' if needed else ''})."
    if not isinstance(thing, str):
        return ""
    named = thing in (*ALONE, *OF_TARGET) or _is_drafter(thing)
    return f' Pass {options}={{"draft": "{thing}"}} in its place.' if named else f" Load the model, AutoModelForCausalLM.from_pretrained({thing!r}), and pass that."


def _check_draft(draft: str, options: Any, source: Any) -> None:
    try:
        plain = isinstance(options, dict) and all(isinstance(name, str) for name in options) and json.dumps(options, allow_nan=False)
    except (TypeError, ValueError):
        plain = False
    if not plain:
        raise ValueError(f"draft_options={options!r} must be a dict of names and JSON values, the keyword arguments of the draft.")
    if source is None:
        return
    if not isinstance(source, str) or not source:
        raise ValueError(f"draft_source={source!r} must be a folder, a file or a hub id, or None.")
    if draft not in DRAFTS:
        raise ValueError(f"draft_source={source!r}: draft={draft!r} is a drafter, which says already what is loaded. Leave draft_source out.")
    if draft not in WITH_WEIGHTS:
        raise ValueError(f"draft_source={source!r}: draft={draft!r} has no weights to load; those that do are {list(WITH_WEIGHTS)}.")
