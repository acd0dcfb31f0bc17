"""Where the package meets `generate()`: the instance override, transformers' `custom_generate` hook, and the checks.

`enable` gives one model instance a subclass of its own class, of the same name, whose `generate` understands `speculative=`;
the class itself is never touched. The subclass is made again when a copy or a pickle is loaded.
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import Any

import torch
from transformers import GenerationMixin, PreTrainedModel, StopStringCriteria
from transformers.generation import GenerateDecoderOnlyOutput, MaxLengthCriteria

from . import compat, registry
from .cached_model import CachedModel, assemble_cache
from .config import SpeculativeConfig
from .distributions import Sampler
from .drafts.base import Context, Draft
from .loop import SpeculativeLoop
from .noise import Noise
from .probe import check_batch
from .schedule import AutoSchedule, FixedSchedule
from .sequences import Sequences
from .trace import SpeculationTrace

_OPTIONS = ("num_assistant_tokens", "lenience", "acceptance")


class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """`GenerateDecoderOnlyOutput` with `speculation`, the `SpeculationTrace` of the call."""

    speculation: SpeculationTrace | None = None


# --- enable, disable --------------------------------------------------------------------------------------------------


class _Enabled:
    """The `generate` of an enabled instance; everything else is the instance's own class."""

    def generate(self, *args, speculative=None, assistant_model=None, **kwargs):
        """transformers' `generate` and `speculative=`: True, a dict or a `SpeculativeConfig`. Beside it: `assistant_model` (a
        model, a `Draft`, or None for the config's default draft), `num_assistant_tokens`, `lenience`, `acceptance`. Without
        it, or with False, the call is stock."""
        return _generate(super().generate, *args, speculative=speculative, assistant_model=assistant_model, **kwargs)

    def __reduce_ex__(self, protocol):
        reduced = super().__reduce_ex__(protocol)
        return (_revive, (type(self).__base_class__,), *reduced[2:])


def _revive(base: type):
    made = _enabled_class(base)
    return made.__new__(made)


@lru_cache(maxsize=None)
def _enabled_class(base: type) -> type:
    body = {"__base_class__": base, "__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base.__name__, (_Enabled, base), body)


def enable(model):
    """Let this instance's `generate()` understand `speculative=`; returns the instance. Its class, config and weights stay as
    they are; copies, pickles and saved checkpoints keep working. Enabling twice is enabling once.

    Raises ValueError for models that cannot be used (encoder-decoder, recurrent), TypeError for what is no model.
    """
    if not isinstance(compat.unwrap(model), GenerationMixin) or not hasattr(model, "generate"):
        raise TypeError(f"model: expected a transformers model with generate(), got {type(model).__name__}.")
    compat.traits_of(compat.unwrap(model), "model")
    if not isinstance(model, _Enabled):
        model.__class__ = _enabled_class(type(model))
    return model


def disable(model):
    """Undo `enable`; returns the instance."""
    if isinstance(model, _Enabled):
        model.__class__ = type(model).__base_class__
    return model


def generate(model, *args, speculative=True, **kwargs):
    """`enable(model).generate(...)` without enabling anything: the same arguments, on any transformers model."""
    stock = super(_Enabled, model).generate if isinstance(model, _Enabled) else model.generate
    return _generate(stock, *args, speculative=speculative, **kwargs)


def _generate(stock, *args, speculative=None, assistant_model=None, **kwargs):
    if speculative is None or speculative is False:
        if isinstance(assistant_model, Draft):
            raise ValueError("assistant_model is a hf_specdec Draft, which plain generate() does not know; pass speculative=True too.")
        given = {} if assistant_model is None else {"assistant_model": assistant_model}
        return stock(*args, **given, **kwargs)
    options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
    config = SpeculativeConfig.resolve(speculative, **options)
    bound = {name: kwargs.pop(name, None) for name in ("streamer", "tokenizer", "assistant_tokenizer", "stop_strings")}
    if kwargs.pop("custom_generate", None) is not None:
        raise ValueError("custom_generate cannot be combined with speculative=; pass custom_generate=SpeculativeDecoder(...) alone.")
    decoder = SpeculativeDecoder(assistant_model, config, **bound)
    decoder.put_prompt = True
    return stock(*args, custom_generate=decoder, **decoder.without_stop_strings(kwargs))


# --- the decoding method ----------------------------------------------------------------------------------------------


class SpeculativeDecoder:
    """A decoding method for `generate(custom_generate=...)`.

    draft: a model, a `Draft`, or None (the config's default draft). config: `SpeculativeConfig`, dict or None.
    streamer, tokenizer, stop_strings: `generate()` does not hand these to a custom decoding method, so pass them here.
    assistant_tokenizer: if given with `tokenizer`, the two vocabularies are compared.
    """

    def __init__(self, draft: PreTrainedModel | Draft | None = None, config: SpeculativeConfig | dict | None = None, *,
                 streamer=None, tokenizer=None, assistant_tokenizer=None, stop_strings=None):
        self.config = SpeculativeConfig.resolve(config)
        self.draft = _as_draft(draft, self.config)
        self.streamer, self.tokenizer, self.stop_strings = streamer, tokenizer, stop_strings
        self.put_prompt = False
        if stop_strings is not None and tokenizer is None:
            raise ValueError("stop_strings needs tokenizer=, the target's tokenizer, beside it.")
        _check_tokenizers(tokenizer, assistant_tokenizer)

    def without_stop_strings(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """transformers refuses stop strings without a tokenizer, which it hands to no custom method: take them over."""
        given = kwargs.get("generation_config")
        if getattr(given, "stop_strings", None) is not None:
            if self.tokenizer is None:
                raise ValueError("stop_strings needs tokenizer=, the target's tokenizer, beside it.")
            self.stop_strings = self.stop_strings or given.stop_strings
            kwargs = {**kwargs, "generation_config": type(given).from_dict({**given.to_dict(), "stop_strings": None})}
        return kwargs

    @torch.no_grad()
    def __call__(self, model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs):
        """What transformers calls after it has prepared inputs, processors and criteria. Returns int64 [B, P + new], or a
        `SpeculativeOutput` with `return_dict_in_generate=True`."""
        call = _Call(self, model, input_ids, logits_processor, generation_config, model_kwargs)
        criteria = [c for c in stopping_criteria if not isinstance(c, MaxLengthCriteria)]
        if self.stop_strings is not None:
            criteria.append(StopStringCriteria(self.tokenizer, self.stop_strings))
        return call.run(criteria)


class _Call:
    """One call of `generate`: checks the arguments, makes the pieces, runs the loop, and packs what comes out."""

    def __init__(self, decoder: SpeculativeDecoder, model, input_ids, processors, generation_config, model_kwargs):
        self.decoder, self.model, self.config = decoder, model, decoder.config
        self.input_ids, self.generation = input_ids, generation_config
        self.traits = compat.traits_of(compat.unwrap(model), "target")
        _check_vocabulary(decoder.draft, self.traits)
        _check_call(model, input_ids, processors, generation_config, model_kwargs, self.traits)
        mask = model_kwargs.get("attention_mask")
        mask = torch.ones_like(input_ids) if mask is None else mask[:, -input_ids.shape[1]:]
        self.prompts = [row[keep].tolist() for row, keep in zip(input_ids, mask.bool())]
        if min(map(len, self.prompts)) == 0:
            raise ValueError("input_ids: a row without a token cannot be continued; give every row at least one.")
        self.padding = [input_ids.shape[1] - len(row) for row in self.prompts]
        if hasattr(decoder.streamer, "put") and len(self.prompts) > 1:
            raise ValueError(f"streamer: a text streamer takes one row, this call has {len(self.prompts)}. Pass a callable "
                             f"streamer(row, tokens, drafted).")
        self.max_new = generation_config.max_length - input_ids.shape[1]
        self.processors = compat.processors_per_row(processors, self.padding)
        self.cache = model_kwargs.get("past_key_values")
        self.given = self.cache is not None and (self.cache.get_seq_length() > 0 or getattr(self.cache, "_is_user_defined", False))

    def run(self, criteria: list) -> Any:
        generation, decoder = self.generation, self.decoder
        device, batch = self.model.device, len(self.prompts)
        as_dict = generation.return_dict_in_generate
        rule = self._acceptance()
        sequences = Sequences(self.prompts, self.max_new, criteria, device, decoder.streamer)
        longest = max(map(len, self.prompts)) + self.max_new
        reach = self.config.max_auto_tokens if self.config.num_assistant_tokens == "auto" else self.config.num_assistant_tokens
        target = CachedModel(self.model, longest + reach, "target", self.traits)
        if self.given and self.cache.get_seq_length():
            target.load(self.cache, self.padding, self.cache.get_seq_length())
        sampler = Sampler(self.processors, rule.samples, bool(as_dict and generation.output_scores))
        noise = Noise(self._seeds(batch), device)
        context = Context(sequences.tokens, longest, self.traits.vocab_size, device, sampler, noise.uniform)
        trace = SpeculationTrace(self.config.to_dict() | {"acceptance": self.rule_name}, rule.lossless)
        loop = SpeculativeLoop(
            target, decoder.draft, rule, sampler, self._schedule(), sequences, noise, context, trace,
            want_scores=bool(as_dict and generation.output_scores), want_logits=bool(as_dict and generation.output_logits),
            want_cache=bool(self.given or as_dict),
        )
        self._run(loop, sequences)
        return self._pack(loop, sequences)

    def _run(self, loop: SpeculativeLoop, sequences: Sequences) -> None:
        streamer = self.decoder.streamer
        if self.decoder.put_prompt and hasattr(streamer, "put"):
            streamer.put(self.input_ids.cpu())
        if self.max_new > 0:
            loop.run()
        if hasattr(streamer, "end"):
            streamer.end()
        trace = loop.trace
        trace.target_calls, trace.draft_calls = loop.target.calls, loop.draft.calls
        trace.drafted = [row.drafted for row in sequences.rows]
        trace.seconds["forward"] = loop.target.seconds + loop.draft.forward_seconds
        _warn_if_nothing_is_accepted(trace, loop.draft)

    def _pack(self, loop: SpeculativeLoop, sequences: Sequences) -> Any:
        pad = self.generation._pad_token_tensor
        ids = sequences.padded(self.input_ids, 0 if pad is None else int(pad))
        cache = None
        if loop.want_cache and len(loop.cached_rows) == len(sequences.rows):
            rows = [loop.cached_rows[row.index] for row in sequences.rows]
            cache = assemble_cache(self.model.config, rows, self.padding, ids.shape[1] - 1, self.cache)
        if not self.generation.return_dict_in_generate:
            return ids
        output = SpeculativeOutput(
            sequences=ids,
            scores=_stacked([row.scores for row in sequences.rows]) if loop.want_scores else None,
            logits=_stacked([row.logits for row in sequences.rows]) if loop.want_logits else None,
            past_key_values=cache,
        )
        output.speculation = loop.trace
        return output

    @property
    def rule_name(self) -> str:
        name = self.config.acceptance
        return ("speculative_sampling" if self.generation.do_sample else "greedy") if name == "auto" else name

    def _acceptance(self):
        rule = registry.load(registry.ACCEPTANCE, self.rule_name, "acceptance")(self.config.lenience)
        if rule.samples != bool(self.generation.do_sample):
            raise ValueError(f"acceptance={self.rule_name!r} does not go with do_sample={self.generation.do_sample}; use \"auto\".")
        return rule

    def _schedule(self):
        k = self.config.num_assistant_tokens
        if k != "auto":
            return FixedSchedule(k)
        draft = self.decoder.draft
        return AutoSchedule(self.config.max_auto_tokens, draft.relative_cost(self.model), self.config.seed is None, draft.prior)

    def _seeds(self, batch: int) -> list[int]:
        seed = self.config.seed
        if isinstance(seed, tuple):
            if len(seed) != batch:
                raise ValueError(f"seed: {len(seed)} seeds for {batch} rows; give one per row, or a single int.")
            return list(seed)
        if seed is None:
            seed = int(torch.randint(2**62, ()))
        return [(seed + row) % 2**63 for row in range(batch)]


# --- checks -----------------------------------------------------------------------------------------------------------


def _as_draft(draft: Any, config: SpeculativeConfig) -> Draft:
    if draft is None:
        return registry.load(registry.DRAFTS, config.draft, "draft")()
    if isinstance(draft, Draft):
        return draft
    if isinstance(compat.unwrap(draft), PreTrainedModel):
        return registry.load(registry.DRAFTS, "model", "draft")(draft)
    raise TypeError(f"assistant_model: expected a transformers model or a hf_specdec Draft, got {type(draft).__name__}.")


def _check_vocabulary(draft: Draft, traits: compat.ModelTraits) -> None:
    """Sizes may differ by padding, no more."""
    own = getattr(getattr(draft, "traits", None), "vocab_size", traits.vocab_size)
    if min(own, traits.vocab_size) < 0.9 * max(own, traits.vocab_size):
        raise ValueError(f"assistant_model has a vocabulary of {own} tokens, the target one of {traits.vocab_size}: not the same "
                         f"tokenizer. Speculative decoding needs a draft with the target's tokenizer.")


def _check_tokenizers(tokenizer, assistant_tokenizer) -> None:
    if tokenizer is None or assistant_tokenizer is None:
        return
    ours, theirs = tokenizer.get_vocab(), assistant_tokenizer.get_vocab()
    different = [token for token in ours.keys() & theirs.keys() if ours[token] != theirs[token]]
    if different or len(ours.keys() ^ theirs.keys()) > max(64, len(ours) // 100):
        raise ValueError("assistant_tokenizer: the draft's vocabulary is not the target's; speculative decoding needs a draft "
                         "with the same tokenizer.")


def _check_call(model, input_ids, processors, generation, model_kwargs: dict, traits: compat.ModelTraits) -> None:
    """Everything that can be refused is refused here, before any forward."""
    if (generation.num_beams or 1) > 1:
        raise ValueError(f"num_beams={generation.num_beams}: speculative=True does greedy decoding and sampling. Use num_beams=1.")
    if model_kwargs.get("inputs_embeds") is not None:
        raise ValueError("inputs_embeds: the draft needs token ids. Pass input_ids.")
    if input_ids.ndim != 2 or input_ids.shape[1] == 0:
        raise ValueError("input_ids: the prompt is empty; give at least one token per row.")
    if traits.max_positions and input_ids.shape[1] >= traits.max_positions:
        raise ValueError(f"input_ids: the prompt has {input_ids.shape[1]} tokens and the target's context is {traits.max_positions}. "
                         f"Shorten the prompt.")
    if generation.cache_implementation not in (None, "dynamic"):
        raise ValueError(f"cache_implementation={generation.cache_implementation!r}: the speculative loop keeps a cache of its own, "
                         f"which can roll back. Leave cache_implementation unset.")
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(generation, name, None) and generation.return_dict_in_generate:
            raise ValueError(f"{name}=True: not available from a pass that scores several tokens. Drop it, or use speculative=False.")
    known = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep", "cache_position", "token_type_ids",
             "output_attentions", "output_hidden_states"}
    for name, value in model_kwargs.items():
        if value is not None and name not in known:
            raise ValueError(f"{name}: this model input is not supported with speculative=True. Drop it, or use speculative=False.")
    cache = model_kwargs.get("past_key_values")
    if cache is not None:
        compat.check_cache(cache)
        if cache.get_seq_length() >= input_ids.shape[1]:
            raise ValueError(f"past_key_values holds {cache.get_seq_length()} tokens and input_ids {input_ids.shape[1]}; input_ids must be "
                             f"the whole conversation, with at least one token that is not cached yet.")
    compat.check_rope(compat.unwrap(model), generation.max_length, "target")
    compat.check_processors(processors)
    check_batch(compat.unwrap(model), traits, input_ids.shape[0], "target")


def _warn_if_nothing_is_accepted(trace: SpeculationTrace, draft: Draft) -> None:
    if draft.name == "model" and trace.proposed >= 100 and trace.acceptance_rate < 0.02:
        warnings.warn(f"assistant_model: {trace.accepted} of {trace.proposed} drafted tokens were accepted. Does the draft have the "
                      f"target's tokenizer?", stacklevel=4)


def _stacked(rows: list[list[torch.Tensor]]) -> tuple[torch.Tensor, ...]:
    """Per committed token [B, V]; rows that have ended carry zeros."""
    width = max(map(len, rows))
    blank = torch.zeros_like(next(row for row in rows if row)[0]) if width else None
    return tuple(torch.stack([row[i] if i < len(row) else blank for row in rows]) for i in range(width))
