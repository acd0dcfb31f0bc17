"""Where the package meets `generate()`: the instance override, transformers' `custom_generate` hook, and the checks.

`enable` gives one model instance a subclass of its own class, of the same name, whose `generate` understands `speculative=`;
the class itself is never touched. The subclass is made again when a copy or a pickle is loaded.
"""

from __future__ import annotations

import copy
import threading
from contextlib import contextmanager
from functools import lru_cache, partial
from types import MethodType
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel, StopStringCriteria

from . import adapters, compat, method, registry, standing, stock_drafts
from .arguments import check_arguments, check_draft, check_hook, check_names, check_said_once, given_in_config, goes_into
from .beam import BeamCall
from .call import Call
from .compiled import free
from .config import SpeculativeConfig
from .drafts.base import Draft
from .hints import by_name, meant, what
from .loading import as_draft, behind, loaded, source_of
from .probe import check_weights
from .sequences import check_streamer
from .signatures import named_arguments
from .trace import SpeculationTrace

_OPTIONS = ("num_assistant_tokens", "lenience", "acceptance")
method.announce()


# --- enable, disable --------------------------------------------------------------------------------------------------


class _Enabled:
    """The `generate` of an enabled instance; everything else is the instance's own class."""

    def generate(self, *args, speculative=None, assistant_model=None, **kwargs):
        """transformers' `generate` and `speculative=`: True, a dict or a `SpeculativeConfig`. Beside it: `assistant_model` (a
        model, a `Draft`, or None for the config's default draft), `num_assistant_tokens`, `lenience`, `acceptance`. Without
        it the call is stock, unless `enable` was told otherwise; with False it is."""
        stock = super().generate if isinstance(self, _Enabled) else MethodType(type(self).generate, self)  # kept by a caller, and disabled since
        return standing.call(partial(_generate, self, stock, *args, **kwargs), self, named_arguments(stock, args, kwargs), speculative, assistant_model)

    def __reduce_ex__(self, protocol):
        reduced = super().__reduce_ex__(protocol)
        return (_revive, (type(self).__base_class__,), *reduced[2:])


def _revive(base: type):
    made = _enabled_class(base)
    return made.__new__(made)


@lru_cache(maxsize=None)
def _enabled_class(base: type) -> type:
    body = {"__base_class__": base, "__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base.__name__, (_Enabled, base), body | adapters.taking_off(base, enable))


@partial(by_name, remedy=lambda name, known: goes_into("speculative", name) or ": options and drafts go by name, here or to generate()")
def enable(model, *, speculative: bool | dict | SpeculativeConfig | None = None, assistant_model: PreTrainedModel | Draft | None = None):
    """Let this instance's `generate()` understand `speculative=`; returns the instance. Its class, config and weights stay as
    they are; copies, pickles and saved checkpoints keep working. Enabling twice is enabling once.

    speculative: what calls without `speculative=` do from now on, for code that calls `generate()` itself (pipelines, lm-eval, TRL). Such a call that is refused runs
        without speculation, and a warning says why. False: such calls are stock again.
    assistant_model: the draft of speculative calls that pass none.

    Raises ValueError for models that cannot be used (Reformer, for one), whose `generate` has been replaced, or whose MX weights were not loaded as such; TypeError
    for what is no model.
    """
    if not isinstance(compat.unwrap(model), GenerationMixin) or not hasattr(model, "generate"):
        raise TypeError(f"model: expected a transformers model with generate(), got {what(model)}.{_model_in(model)}")
    compat.traits_of(behind(compat.unwrap(model)), "model")
    check_weights(compat.unwrap(model), "model")
    if not isinstance(model, _Enabled):
        if "generate" in vars(model):
            raise ValueError("model: this instance has a generate of its own, which would hide the one that understands speculative=. Take it off (del "
                             "model.generate), enable the model, and wrap its generate again.")
        model.__class__ = _enabled_class(type(model))
    if speculative is not None or assistant_model is not None:
        standing.say(model, speculative, assistant_model)
    return model


def _model_in(thing: Any) -> str:
    """Where there is a model, for what is none."""
    if hasattr(thing, "_orig_mod"):
        return " Enable the model that was compiled, before torch.compile."
    if isinstance(thing, str):
        return f" Load it first: enable(AutoModelForCausalLM.from_pretrained({thing!r}))."
    if isinstance(thing, type) and hasattr(thing, "from_pretrained"):
        return f" Load one first: enable({thing.__name__}.from_pretrained(...))."
    headless = " It has no head that writes tokens: load it with AutoModelForCausalLM.from_pretrained." if isinstance(thing, PreTrainedModel) else ""
    found = [where for where in ("pipe.model", "wrapped.module") if isinstance(getattr(thing, where.partition(".")[2], None), GenerationMixin)]
    return f" Enable the model inside it: enable({found[0]})." if found else headless  # of a pipeline; of torch's DataParallel


def disable(model):
    """Undo `enable`; returns the instance. What compiled passes keep on a GPU for the next call (a cache) is freed, of a draft model, too."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: expected the model that was enabled, got {what(model)}.")
    free(model)
    if isinstance(model, _Enabled):
        model.__class__ = type(model).__base_class__
        standing.unsay(model)
    return model


def generate(model, *args, speculative=True, **kwargs):
    """`enable(model).generate(...)` without enabling anything: the same arguments, on any transformers model."""
    stock = super(_Enabled, model).generate if isinstance(model, _Enabled) else model.generate
    return _generate(model, stock, *args, speculative=speculative, **kwargs)


def _generate(model, stock, *args, began=None, speculative=None, assistant_model=None, **kwargs):
    named, own = named_arguments(stock, args, kwargs), compat.unwrap(model).generation_config
    if speculative is None:
        speculative = getattr(named.get("generation_config"), "speculative", None)
    if speculative is None or speculative is False:
        if isinstance(named.get("custom_generate"), SpeculativeDecoder):
            check_hook({"assistant_model": assistant_model, **named}, own)
        if isinstance(assistant_model, Draft):
            raise ValueError("assistant_model is a hf_specdec Draft, which plain generate() does not know; pass speculative=True too.")
        given = {} if assistant_model is None else {"assistant_model": assistant_model}
        with standing.explained(named):
            return stock(*args, **given, **kwargs)
    kwargs = dict(named)
    assistant_model = assistant_model if (by_position := kwargs.pop("assistant_model", None)) is None else by_position
    options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
    check_said_once(speculative, options)
    said = {**speculative, **options} if isinstance(speculative, dict) else options
    kwargs, asked = stock_drafts.taken_over(kwargs, model, *(assistant_model, said) if began is None else ())  # began: enable() said it, which a call may override
    if not isinstance(speculative, SpeculativeConfig) and "num_assistant_tokens" not in said:
        options["num_assistant_tokens"] = given_in_config(kwargs, own, "num_assistant_tokens")
    config, assistant_model = asked.put_into(SpeculativeConfig.resolve(speculative, **options)), assistant_model if asked == stock_drafts.Asked() else asked.draft
    bound = {name: kwargs.pop(name, None) for name in ("streamer", "tokenizer", "assistant_tokenizer", "stop_strings")}
    if kwargs.pop("custom_generate", None) is not None:
        raise ValueError("custom_generate cannot be combined with speculative=; pass custom_generate=SpeculativeDecoder(...) alone.")
    check_names(kwargs, compat.unwrap(model))
    check_arguments(kwargs, compat.unwrap(model))
    check_draft(assistant_model, "assistant_model", "speculative")
    standing.check_one_draft(speculative if began is None else None, assistant_model)
    decoder = SpeculativeDecoder(assistant_model, config, **bound)
    decoder.began = began or decoder.began
    decoder.load(model)
    decoder.given = kwargs
    decoder.cache_is_given = any(kwargs.get(name) is not None for name in (compat.CACHE, "past_key_values"))
    with decoder.stop_strings_taken_over(compat.unwrap(model), kwargs) as kwargs:
        output = stock(custom_generate=decoder, **kwargs)
    if getattr(output, "sequences", None) is not None and getattr(output, "speculation", None) is None:
        output.speculation = decoder.trace  # Whisper makes an output of its own of ours
    return output


# --- the decoding method ----------------------------------------------------------------------------------------------


class SpeculativeDecoder:
    """A decoding method for `generate(custom_generate=...)`.

    draft: a model, a `Draft`, or None (the config's default draft). config: `SpeculativeConfig`, or a dict of its options, or None.
    streamer, tokenizer, stop_strings: `generate()` does not hand these to a custom decoding method, so pass them here; nor does it hand on
        assistant_model, whose place is `draft`.
    assistant_tokenizer: the draft model's; needs `tokenizer` beside it. Where the two differ, the model becomes a `TranslatedDraft`.
    trace: the `SpeculationTrace` of the last pass that returned one (with `return_dict_in_generate=True`), else None.
    """

    @partial(by_name, remedy=lambda name, known: ": custom_generate takes an instance, SpeculativeDecoder()" if name == "logits_processor" else meant(name, known) or goes_into("config", name))
    def __init__(self, draft: PreTrainedModel | Draft | None = None, config: SpeculativeConfig | dict | None = None, *,
                 streamer=None, tokenizer=None, assistant_tokenizer=None, stop_strings=None):
        check_draft(draft, "draft", "config")
        self.config = SpeculativeConfig.resolve(config)
        self.streamer, self.tokenizer, self.stop_strings, self.assistant_tokenizer = streamer, tokenizer, stop_strings, assistant_tokenizer
        self.draft: Draft | None = None  # until there is a target to load it for
        self.passed = draft is not None
        if draft is not None or source_of(self.config) is None:
            self._take(draft)
        self.given: dict[str, Any] | None = None  # the arguments of `generate`, where they are known
        self.cache_is_given = False
        self.began = threading.Event()  # set as the first round begins: what a call refuses, it has refused
        self.trace: SpeculationTrace | None = None
        self._give_back = _nothing  # to the model, when transformers has prepared the call
        check_streamer(streamer)
        self._check_stop_strings()

    def _check_stop_strings(self) -> None:
        if self.stop_strings is not None and self.tokenizer is None:
            raise ValueError("stop_strings needs tokenizer=, the target's tokenizer, beside it.")

    def _take(self, draft: PreTrainedModel | Draft | None) -> None:
        self.draft = as_draft(_translated(draft, self.config, self.tokenizer, self.assistant_tokenizer), self.config)

    def load(self, model: PreTrainedModel) -> None:
        """Load what the config names, for the target `model`, if no draft was passed."""
        if self.draft is not None:
            return
        found = loaded(self.config, behind(model))
        if isinstance(found, Draft):
            self.draft = found
        else:
            self._take(found)

    def settings(self, acceptance: str) -> dict[str, Any]:
        """The config in force, as a trace keeps it: with the draft that was passed in place of the one that it names."""
        used = {"draft": self.draft.name, "draft_source": None} if self.passed else {}
        return self.config.to_dict() | used | {"acceptance": acceptance}

    @contextmanager
    def stop_strings_taken_over(self, model: PreTrainedModel, kwargs: dict[str, Any]):
        """transformers refuses stop strings without a tokenizer, which it hands to no custom method: while it prepares a call they are ours,
        and neither the `generation_config` passed on nor the model's own has any. No two calls are prepared at once."""
        given = kwargs.get("generation_config")
        with _preparing:
            own = model.generation_config  # of a call that is being prepared, it may lack its stop strings
        strings = [getattr(config, "stop_strings", None) for config in (given, own)]
        self.stop_strings = self.stop_strings or strings[0] or strings[1]
        self._check_stop_strings()
        if strings[0] is not None:
            kwargs = {**kwargs, "generation_config": _without_stop_strings(given)}
        if strings[1] is None:
            yield kwargs
            return

        def give_back() -> None:
            if self._give_back is give_back:
                self._give_back, model.generation_config = _nothing, own
                _preparing.release()

        _preparing.acquire()
        self._give_back, model.generation_config = give_back, _without_stop_strings(own)
        try:
            yield kwargs
        finally:
            self._give_back()

    @torch.no_grad()
    def __call__(self, model, input_ids, logits_processor, stopping_criteria, generation_config, inputs_tensor=None, **model_kwargs):
        """What transformers calls with prepared inputs, processors and criteria. Returns int64 [B, P + new], or by `return_dict_in_generate` a `SpeculativeOutput`."""
        self._give_back()
        self.load(model)
        beams = (generation_config.num_beams or 1) > 1
        call = (BeamCall if beams else Call)(self, model, input_ids, logits_processor, generation_config, inputs_tensor, model_kwargs)
        criteria = type(stopping_criteria)(stopping_criteria)
        if self.stop_strings is not None:
            criteria.append(StopStringCriteria(self.tokenizer, self.stop_strings))
        output = call.run(criteria)
        self.trace = getattr(output, "speculation", None)
        return output


_preparing = threading.RLock()


def _nothing() -> None:
    pass


def _without_stop_strings(config: GenerationConfig) -> GenerationConfig:
    config = copy.deepcopy(config)
    config.stop_strings = None
    return config


# --- checks -----------------------------------------------------------------------------------------------------------


def _translated(draft: Any, config: SpeculativeConfig, tokenizer, assistant_tokenizer) -> Any:
    """A draft model that comes with another tokenizer than the target's as a `TranslatedDraft`, the universal assisted decoding of
    transformers; anything else as it is."""
    if assistant_tokenizer is None:
        return draft
    if tokenizer is None:
        raise ValueError("assistant_tokenizer needs tokenizer=, the target's tokenizer, beside it: the two are compared, and where they differ the "
                         "draft's text is translated.")
    ours, theirs = tokenizer.get_vocab(), assistant_tokenizer.get_vocab()
    if len(ours.keys() ^ theirs.keys()) <= min(max(64, len(ours) // 100), len(ours) // 10) and all(ours[token] == theirs[token] for token in ours.keys() & theirs.keys()):
        return draft
    if not isinstance(compat.unwrap(draft), PreTrainedModel):
        raise ValueError(f"assistant_tokenizer: its vocabulary is not that of tokenizer, and assistant_model={type(draft).__name__} is no model that could "
                         f"be translated. Pass the draft model itself, or leave assistant_tokenizer out if the draft proposes the target's ids.")
    if config.draft == "model_tree" or config.draft_stop in ("confidence", "expected_gain"):
        raise ValueError("assistant_tokenizer: a draft model with another tokenizer drafts chains of a fixed length. Leave draft and draft_stop out.")
    return registry.load(registry.DRAFTS, "translated", "draft")(draft, tokenizer, assistant_tokenizer)
